"""Trains each method of a study file with each learning rate, seed and task, evaluates the runs, and writes a report.

    python -m poly_epo_jax.study FILE [--num_parallel=N | --gpus=0,1,2,3] [--report] [--config.KEY=VALUE ...]

FILE defines a function get_study() that returns a Study. docs/how_to/compare_methods.md describes its fields, and
studies/ contains examples, which can be given by name, such as `polynomial`. Each run is a process
`python -m poly_epo_jax.main` with its own run folder. By default, each GPU executes one run at a time, all TPU chips
together execute one, and without accelerators each core executes one. Rerun the command to resume an interrupted study:
finished runs are skipped, and the other runs resume from their checkpoints.
"""

import os

if __name__ == "__main__":  # before the imports below
    os.environ.pop("MPLBACKEND", None)  # the backend of a notebook may not be installed here, and is not used

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.config.recipes import find_file
from poly_epo_jax.startup.command_line import unknown_argument
from poly_epo_jax.startup.prepare import check_writable
from poly_epo_jax.study.page import write_study_report
from poly_epo_jax.study.plan import StudyRun, make_runs, write_plan
from poly_epo_jax.study.progress import StudyProgress
from poly_epo_jax.study.queue import cores, default_workers, gpus, run_all
from poly_epo_jax.study.spec import read_study
from poly_epo_jax.system.output_folder import claim_folder
from poly_epo_jax.system.signals import Stopped, exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (`sys.argv` if None).

    Returns:
      The exit code: 0 if no run failed or with --report, 1 if runs failed, 2 after an error such as an invalid study
      file or configuration, or 128 plus the number of the signal that stopped the study.
    """
    parser = argparse.ArgumentParser("python -m poly_epo_jax.study", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", metavar="FILE", help="Python file that defines get_study(), or the name of a recipe")
    parser.add_argument(
        "--num_parallel",
        type=_positive,
        default=0,
        metavar="N",
        help="number of parallel runs on one core each (default: all devices)",
    )
    parser.add_argument(
        "--gpus", default="", metavar="0,1", help="GPUs that execute one run each (0+1,2+3 = two GPUs per run)"
    )
    parser.add_argument("--report", action="store_true", help="only write the report, without starting runs")
    logging.getLogger("absl").setLevel(logging.WARNING)

    def work() -> int:
        given = sys.argv[1:] if arguments is None else arguments
        overrides = [argument for argument in given if argument.startswith("--config.")]
        options, unknown = parser.parse_known_args([argument for argument in given if argument not in overrides])
        if unknown:
            parser.error(unknown_argument(unknown[0], parser))
        workers = cores(options.num_parallel) if options.num_parallel else default_workers()
        if options.gpus:
            workers = gpus(options.gpus)
        study = read_study(find_file(options.file, "studies"))
        folder = Path(study.folder)
        check_writable("Study.folder", folder)
        try:
            runs = make_runs(study, overrides)
        except ConfigError as error:
            print("\n".join(f"Error: {line}" for line in str(error).splitlines()), file=sys.stderr)
            return 2
        with claim_folder(folder, "study"):
            write_plan(study, runs)
            try:
                code = 0 if options.report else _run_unfinished(folder, runs, workers)
            except Stopped as stopped:
                print(
                    f"{stopped}: all runs have saved their last step. Rerun the command to resume.",
                    file=sys.stderr,
                )
                return 128 + stopped.number
            report = write_study_report(folder)
        print(f"report: {report}")
        return code

    return exit_code(work)


def _run_unfinished(folder: Path, runs: Sequence[StudyRun], workers: Sequence[dict[str, str]]) -> int:
    """Runs the unfinished jobs, prints the names of failed runs and returns the exit code."""
    finished = sum(run.is_trained() and run.is_evaluated() for run in runs)
    with StudyProgress(runs, finished, Console()) as show:
        rows = asyncio.run(run_all(folder, runs, workers, show.started, show.ended))
    failed = [row["run"] for row in rows if row["exit"]]
    if failed:
        print(
            f"Error: {len(failed)} of {len(runs)} runs failed: {', '.join(failed)}. See log.txt in their run folders, "
            "and rerun the command to retry them.",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive integer")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
