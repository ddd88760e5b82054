"""Trains every method of a study file with every rate, seed and task, evaluates the runs, and writes one report.

    python -m poly_epo_jax.study FILE [--parallel=N | --gpus=0,1,2,3] [--report] [--config.KEY=VALUE ...]

FILE has a function get_study() that returns a Study; docs/study.md explains how to write it, and studies/ has examples.
Every run is a command `python -m poly_epo_jax.main` with its own run folder, by default one at a time on each GPU or,
without GPUs, on each core. After an interruption, the same command continues the study: finished runs are left alone,
and the others resume from their checkpoints.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.study.folder import LOCK
from poly_epo_jax.study.page import write_study_report
from poly_epo_jax.study.plan import StudyRun, make_runs, write_plan
from poly_epo_jax.study.progress import show_progress
from poly_epo_jax.study.queue import cores, default_workers, gpus, run_all
from poly_epo_jax.study.spec import read_study
from poly_epo_jax.system.file_lock import exclusive
from poly_epo_jax.system.signals import Stopped, exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line (`sys.argv` if None).

    Returns:
      The exit code: 0 if every run is finished, 1 if some failed, 2 if the study file or a configuration is wrong, or
      128 + the signal that ended the study.
    """
    parser = argparse.ArgumentParser("python -m poly_epo_jax.study", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="with get_study()")
    parser.add_argument("--parallel", type=_positive, default=0, metavar="N", help="runs side by side, a core each")
    parser.add_argument("--gpus", default="", metavar="0,1", help="one run on each of these; 0+1,2+3 gives each two")
    parser.add_argument("--report", action="store_true", help="train nothing; write the report of what is there")
    given = sys.argv[1:] if arguments is None else arguments
    overrides = [argument for argument in given if argument.startswith("--config.")]
    options = parser.parse_args([argument for argument in given if argument not in overrides])
    workers = cores(options.parallel) if options.parallel else default_workers()
    if options.gpus:
        workers = gpus(options.gpus)
    logging.getLogger("absl").setLevel(logging.WARNING)

    def work() -> int:
        study = read_study(options.file)
        folder = Path(study.folder)
        try:
            runs = make_runs(study, overrides)
        except ConfigError as error:
            print("\n".join(f"Error: {mistake}" for mistake in str(error).splitlines()), file=sys.stderr)
            return 2
        with exclusive(folder / LOCK, f"the study {folder}"):
            write_plan(study, runs)
            try:
                code = 0 if options.report else _run_unfinished(folder, runs, workers)
            except Stopped as stopped:
                print(
                    f"{stopped}: every run has saved its last step; the same command goes on from there.",
                    file=sys.stderr,
                )
                return 128 + stopped.number
            report = write_study_report(folder)
        print(f"report: {report}")
        return code

    return exit_code(work)


def _run_unfinished(folder: Path, runs: Sequence[StudyRun], workers: Sequence[dict[str, str]]) -> int:
    """Runs everything that is not finished, and reports which runs failed."""
    with show_progress(runs) as listener:
        rows = asyncio.run(run_all(folder, runs, workers, listener))
    failed = [row["run"] for row in rows if row["exit"]]
    if failed:
        print(
            f"Error: {len(failed)} of {len(runs)} runs failed: {', '.join(failed)}; log.txt in the folder of each says "
            "why, and the same command tries them again.",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
