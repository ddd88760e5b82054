"""Creates a report on runs and evaluations: figures and a self-contained HTML page.

    python -m poly_epo_jax.report FOLDER [FOLDER ...] [--output DIR] [--models NAME,NAME]

FOLDER is the folder of a run, which may be in progress, or of an evaluation. Several folders are compared on one page.
The command writes report.html, and each figure as PNG and PDF, to FOLDER/report by default, or to report/ next to the
first folder if there are several. Figures:
  runs         training_dynamics, comparison, pass_at_k, audit, timeline
  evaluations  evaluation_pass_at_k, majority, branches, rollout_trees
"""

import os

if __name__ == "__main__":  # before the imports below
    os.environ.pop("MPLBACKEND", None)  # the backend of a notebook may not be installed here, and is not used

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from poly_epo_jax.report.build import write_report
from poly_epo_jax.system.output_folder import user_path
from poly_epo_jax.system.signals import exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (`sys.argv` if None). Returns the exit code: 2 if the report fails."""
    parser = argparse.ArgumentParser(
        "python -m poly_epo_jax.report", description="Create a report on runs or evaluations."
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="run folder or evaluation folder")
    parser.add_argument(
        "--output", type=user_path, metavar="DIR", help="output folder (default: report/ in or next to FOLDER)"
    )
    parser.add_argument(
        "--models", default="", metavar="NAME,NAME", help="evaluated models to show, in this order (default: all)"
    )

    def work() -> None:
        options = parser.parse_args(arguments)
        folders = options.folders
        default = (folders[0] if len(folders) == 1 else folders[0].resolve().parent) / "report"
        models = [name for name in options.models.split(",") if name]
        print(f"report: {write_report(folders, options.output or default, models)}")

    return exit_code(work, after_ctrl_c="the report is incomplete. Rerun the command to write it again.")


if __name__ == "__main__":
    sys.exit(main())
