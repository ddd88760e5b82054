"""Shows what training did, from runs and evaluations: figures, and one self-contained page.

    python -m poly_epo_jax.report FOLDER [FOLDER ...] [--output DIR] [--models NAME,NAME]

FOLDER is a run (it may still be training) or an evaluation; several are shown side by side. The command writes
report.html, and each figure as PNG and PDF, to FOLDER/report by default; for several folders, to report/ next to the
first one. The figures are:
  of runs         training_dynamics, comparison, pass_at_k, timeline
  of evaluations  evaluation_pass_at_k, majority, branches, rollout_trees
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from poly_epo_jax.report.build import write_report
from poly_epo_jax.system.signals import exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line (`sys.argv` if None) and returns the exit code: 2 if there is nothing to report on."""
    parser = argparse.ArgumentParser("python -m poly_epo_jax.report", description="Report on runs and evaluations.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run folder or an evaluation folder")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write; default: report/ in or beside it")
    parser.add_argument("--models", default="", metavar="NAME,NAME", help="models of the evaluations, in this order")
    options = parser.parse_args(arguments)
    folders = options.folders
    default = (folders[0] if len(folders) == 1 else folders[0].resolve().parent) / "report"
    models = [name for name in options.models.split(",") if name]

    def work() -> None:
        print(f"report: {write_report(folders, options.output or default, models)}")

    return exit_code(work, after_ctrl_c="the report is incomplete; the same command writes it again.")


if __name__ == "__main__":
    sys.exit(main())
