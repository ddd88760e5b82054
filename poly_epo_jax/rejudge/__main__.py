"""Clusters recorded responses with one or several judges, and compares the clusterings.

    poly-epo rejudge runs/polynomial-poly_epo --config=polynomial --judge exact --judge ngrams

An input is a run folder, the folder of a model in an evaluation, or a file whose rows have the columns problem,
responses and rewards (.jsonl or .parquet). Each --judge has the form LABEL=NAME:KEY=VALUE,..., where NAME is a value of
judge.name and the keys are those of the section judge. Keys that are not given are those of --config, and the label is
NAME by default:

    --judge large=llm:url=http://127.0.0.1:30010 --judge small=llm:url=http://127.0.0.1:30011,options.temperature=0

Without --judge, the judge of --config is used. Each judge clusters each problem once for each seed, and once for each
further order of the responses. The configuration also defines the method whose advantages are compared, and the task,
for judges that require one. Rerun the command to resume it. clusters.csv in the folder of a judge is a sheet to correct
by hand, for --reference.
"""

import os

if __name__ == "__main__":  # before the imports below
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # accelerators are left to the servers of the judges

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from poly_epo_jax.config.checks import validate
from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.evaluate.folder import open_folder
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.judges.variants import FIRST, variants
from poly_epo_jax.records.recorded_groups import RecordedGroup
from poly_epo_jax.registry import Range
from poly_epo_jax.rejudge.inputs import RecordedTask, read_inputs, with_answers
from poly_epo_jax.rejudge.judges import (
    REQUESTED_AGAIN,
    describe,
    judge_configs,
    read_clusterings,
    read_reference,
    request_clusterings,
    timing_summary,
)
from poly_epo_jax.rejudge.page import write_page
from poly_epo_jax.rejudge.results import (
    RECORDED,
    REFERENCE,
    RESULTS,
    advantages_of,
    clusters_in,
    compare,
    console_tables,
    judge_results,
)
from poly_epo_jax.rejudge.sheets import SHEET, write_sheet
from poly_epo_jax.startup.command_line import config_parser, run_command
from poly_epo_jax.startup.prepare import check_writable
from poly_epo_jax.startup.read_config import check_judge_limit, make_judge, make_task, refuse_passwords
from poly_epo_jax.step.advantages import make_estimator
from poly_epo_jax.system.json_files import Row, write_json
from poly_epo_jax.system.output_folder import claim_folder, user_path
from poly_epo_jax.types import Task


def run_rejudge(config: Config, flags: argparse.Namespace) -> None:
    """Requests the missing clusterings of each judge, and writes results, sheets and page.

    Args:
      config: The configuration.
      flags: Parsed command-line flags of this command.

    Raises:
      ValueError, OSError: If an input or flag is invalid, or a server fails. Completed clusterings are kept on disk.
    """
    _check_flags(flags)
    configs = judge_configs(config, flags.judge)
    groups = read_inputs(flags.inputs, flags.max_problems)
    reference = read_reference(flags.reference, configs, groups)
    advantages = advantages_of(config, groups)
    task: Task = RecordedTask([group.problem for group in groups])
    if any(JUDGES[one.judge.name].task is not Task for one in configs.values()):
        task = make_task(config.task)
        groups = with_answers(groups, task)
    longest = max(len(group.responses) for group in groups)
    opened = {label: make_judge(one.judge, task) for label, one in configs.items()}
    for one in configs.values():
        check_judge_limit(one.judge, "The number of responses", longest)
    about = {label: describe(configs[label], judge, groups) for label, judge in opened.items()}
    wanted = variants(flags.num_seeds, flags.num_orders)
    rows, judges = {}, {}
    with claim_folder(flags.output, "comparison"):
        for label, judge in opened.items():
            folder = flags.output / label
            open_folder(folder, about[label])
            request_clusterings(folder, judge, groups, wanted, configs[label].judge.max_concurrent)
            found = read_clusterings(folder)
            rows[label], judges[label] = found[FIRST], about[label] | judge_results(found, wanted)
            _write_sheet(folder, groups, rows[label])
        judged = {label: clusters_in(of_judge) for label, of_judge in rows.items()}
        if recorded := {group.name: np.array(group.clusters) for group in groups if group.clusters is not None}:
            judged[RECORDED] = recorded
        results = {
            "num_problems": len(groups),
            "method": make_estimator(config.algo).title if advantages else None,
            "judges": judges,
        }
        results |= compare(judged, reference, advantages)
        write_json(flags.output / RESULTS, results)
        timings = {label: timing_summary(flags.output / label) for label in configs}
        shown = judged | {REFERENCE: reference} if isinstance(reference, Mapping) else judged
        write_page(flags.output / "report.html", results, timings, groups, shown, rows)
    for table in console_tables(results):
        Console(markup=False).print(table)
    print(f"report: {flags.output / 'report.html'}")


def _write_sheet(folder: Path, groups: Sequence[RecordedGroup], rows: Mapping[str, Row]) -> None:
    """Writes the cluster sheet of a judge, unless the command must be rerun for missing replies."""
    unanswered = [row for row in rows.values() if row["failure"] in REQUESTED_AGAIN]
    if not unanswered:
        write_sheet(folder / SHEET, groups, rows)
        return
    print(
        f"Warning: The judge {folder.name} did not reply for {len(unanswered)} problems, for example: "
        f"{unanswered[0]['reason']} Rerun the command to request them again.",
        file=sys.stderr,
    )


def _check_flags(flags: argparse.Namespace) -> None:
    if not flags.inputs:
        raise ConfigError("The input is missing; specify a run folder, an evaluated model or a file.")
    refuse_passwords({"--judge": flags.judge})  # must run before any error message that contains a judge
    for name, limit in (("num_seeds", 1), ("num_orders", 1), ("max_problems", 0)):
        validate(getattr(flags, name), f"--{name}", Range(limit, 10**6))
    check_writable("--output", flags.output)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (`sys.argv` if None) and returns the exit code."""
    parser = config_parser(__doc__)
    parser.add_argument("inputs", nargs="*", metavar="RUN_OR_FILE", help="runs, evaluated models or files")
    parser.add_argument(
        "--judge",
        action="append",
        default=[],
        metavar="LABEL=NAME:KEY=VALUE,...",
        help="judge, with its keys that differ from --config (repeatable; default: the judge of --config)",
    )
    parser.add_argument(
        "--num_seeds", type=int, default=2, metavar="N", help="number of seeds per judge and problem (default: 2)"
    )
    parser.add_argument(
        "--num_orders", type=int, default=2, metavar="N", help="number of orders of the responses (default: 2)"
    )
    parser.add_argument("--max_problems", type=int, default=0, metavar="N", help="maximum number of problems (0 = all)")
    parser.add_argument(
        "--reference",
        default="",
        metavar="FILE_OR_LABEL",
        help="corrected cluster sheet to compare with, or judge with which the others are compared",
    )
    parser.add_argument(
        "--output",
        type=user_path,
        default=Path("runs/rejudge"),
        metavar="FOLDER",
        help="output folder of the comparison (default: runs/rejudge)",
    )
    return run_command(parser, arguments, run_rejudge, training=False)


if __name__ == "__main__":
    sys.exit(main())
