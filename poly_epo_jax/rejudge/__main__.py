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

from poly_epo_jax.system.missing_packages import report_missing_packages

if __name__ == "__main__":
    report_missing_packages()  # before the imports below
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # accelerators are left to the servers of the judges

import argparse
import asyncio
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from poly_epo_jax.config.checks import validate
from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.evaluate.folder import open_folder
from poly_epo_jax.judges import JUDGES, judge_identity
from poly_epo_jax.judges.capacity import CHARS_PER_TOKEN, warn_capacity
from poly_epo_jax.records.progress import progress_bar
from poly_epo_jax.records.run_folder import LOCK
from poly_epo_jax.registry import Range
from poly_epo_jax.rejudge.inputs import RecordedGroup, RecordedTask, read_inputs, with_answers
from poly_epo_jax.rejudge.judge_groups import FIRST, REQUESTED_AGAIN, Variant, judge_groups, timing_summary, variants
from poly_epo_jax.rejudge.page import JUDGE_COLUMNS, PAIR_COLUMNS, format_mean, write_page
from poly_epo_jax.rejudge.results import (
    RECORDED,
    REFERENCE,
    RESULTS,
    Clusters,
    advantages_of,
    clusters_in,
    compare,
    judge_results,
    read_clusterings,
)
from poly_epo_jax.rejudge.sheets import SHEET, read_sheet, write_sheet
from poly_epo_jax.startup.command_line import KEY, config_parser, run_command, with_overrides
from poly_epo_jax.startup.prepare import check_writable
from poly_epo_jax.startup.read_config import check_judge_limit, make_judge, make_task, refuse_passwords
from poly_epo_jax.step.advantages import make_estimator
from poly_epo_jax.system.digests import json_digest, option_digests
from poly_epo_jax.system.file_lock import lock_file
from poly_epo_jax.system.json_files import Row, write_json
from poly_epo_jax.system.user_path import user_path
from poly_epo_jax.types import Judge, JudgeLoad, Task

_JUDGE = re.compile(r"(?:(?P<label>[^:=]*)=)?(?P<name>[^:=]+)(?::(?P<keys>.*))?", re.DOTALL)


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
    reference = _read_reference(flags.reference, configs, groups)
    advantages = advantages_of(config, groups)
    task: Task = RecordedTask([group.problem for group in groups])
    if any(JUDGES[one.judge.name].task is not Task for one in configs.values()):
        task = make_task(config.task)
        groups = with_answers(groups, task)
    longest = max(len(group.responses) for group in groups)
    opened = {label: make_judge(one.judge, task) for label, one in configs.items()}
    for one in configs.values():
        check_judge_limit(one.judge, "The number of responses", longest)
    about = {label: _describe(configs[label], judge, groups) for label, judge in opened.items()}
    wanted = variants(flags.num_seeds, flags.num_orders)
    rows, judges = {}, {}
    with lock_file(flags.output / LOCK, f"the comparison {flags.output}"):
        for label, judge in opened.items():
            folder = flags.output / label
            open_folder(folder, about[label])
            _request(folder, judge, groups, wanted, configs[label].judge.max_concurrent)
            found = read_clusterings(folder)
            rows[label], judges[label] = found[FIRST], about[label] | judge_results(found, wanted)
            _write_sheet(folder, groups, rows[label])
        judged = {label: clusters_in(of_judge) for label, of_judge in rows.items()}
        if recorded := {group.name: np.array(group.clusters) for group in groups if group.clusters is not None}:
            judged[RECORDED] = recorded
        method = make_estimator(config.algo).title if advantages else None
        results = {"num_problems": len(groups), "method": method, "judges": judges}
        results |= compare(judged, reference, advantages)
        write_json(flags.output / RESULTS, results)
        timings = {label: timing_summary(flags.output / label) for label in configs}
        shown = judged | {REFERENCE: reference} if isinstance(reference, Mapping) else judged
        write_page(flags.output / "report.html", results, timings, groups, shown, rows)
    for table in _tables(results):
        Console().print(table)
    print(f"report: {flags.output / 'report.html'}")


def judge_configs(config: Config, judges: Sequence[str]) -> dict[str, Config]:
    """Returns the configuration of each judge by its label.

    Args:
      config: The configuration of --config.
      judges: Values of --judge. If empty, the judge of the configuration is used.

    Raises:
      ConfigError: If a value is invalid, or two judges have the same label.
    """
    found: dict[str, Config] = {}
    for text in judges or [config.judge.name]:
        match = _JUDGE.fullmatch(text)
        if match is None:
            raise ConfigError(f"--judge={text} must have the form NAME or LABEL=NAME:KEY=VALUE,...")
        name, label = match["name"], match["name"] if match["label"] is None else match["label"]
        if "/" in label or label in ("", ".", "..", RECORDED, REFERENCE) or label in found:
            raise ConfigError(
                f"--judge={text} has the label {label!r}, which is a duplicate, reserved or not a valid folder name; "
                "set a unique label with LABEL=NAME."
            )
        overrides = [f"name={name}"] if name == config.judge.name else [f"name={name}", "options={}"]
        overrides += re.split(r",(?=[\w.]+=)", match["keys"]) if match["keys"] else []
        found[label] = with_overrides(config, [f"{KEY}judge.{override}" for override in overrides])
        if not JUDGES[name].clusters:
            raise ConfigError(f"--judge={text} does not cluster responses; choose another judge.")
    return found


def _read_reference(text: str, labels: Collection[str], groups: Sequence[RecordedGroup]) -> Clusters | str | None:
    """Returns the clusters in a sheet, the label of a judge, or None for an empty text."""
    is_recorded = text == RECORDED and any(group.clusters is not None for group in groups)
    if not text or is_recorded or text in labels:
        return text or None
    path = user_path(text)
    if not path.is_file():
        raise ConfigError(
            f"--reference={text} is neither a file nor a judge; specify a cluster sheet, or one of "
            f"{', '.join(labels)}, or {RECORDED} for an input with recorded clusters."
        )
    return read_sheet(path, groups)


def _describe(config: Config, judge: Judge, groups: Sequence[RecordedGroup]) -> dict[str, Any]:
    """Waits for the server of a judge, and returns the content of about.json."""
    section, identity = config.judge, asyncio.run(judge_identity(judge))
    problems = json_digest([(group.name, group.problem.prompt, group.responses) for group in groups])
    return {
        "judge": {"name": section.name, "model": section.model, "options": dict(section.options)},
        "digests": {**option_digests("judge.options", section.options), **identity, "problems": problems},
    }


def _request(
    folder: Path, judge: Judge, groups: Sequence[RecordedGroup], wanted: Sequence[Variant], max_concurrent: int
) -> None:
    """Requests the missing clusterings of a judge."""
    prompts = [group.problem.prompt for group in groups]
    responses = [response for group in groups for response in group.responses]
    tokens = [math.ceil(max(map(len, texts)) / CHARS_PER_TOKEN) for texts in (prompts, responses)]

    async def work(show: Callable[[int], None]) -> None:
        num_turns = max(len(turns) // 2 + 1 for group in groups for turns in group.turns or ((),))
        load = JudgeLoad(max(len(group.responses) for group in groups), *tokens, num_turns=num_turns)
        await warn_capacity(judge, load)
        await judge_groups(folder, judge, groups, wanted, max_concurrent, show)

    with progress_bar(f"{folder.name}: requests", len(groups) * len(wanted)) as show:
        asyncio.run(work(show))


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


def _tables(results: Mapping[str, Any]) -> list[Table]:
    """Returns a table of the judges and a table of all pairs, within 80 columns."""
    judges = Table("result", "judge", "mean", title=f"{results['num_problems']} problems")
    for name, (title, _) in JUDGE_COLUMNS.items():
        found = {label: of_judge[name] for label, of_judge in results["judges"].items()}
        for label, value in found.items() if any(found.values()) else ():  # no lines for a single seed or order
            judges.add_row(title, label, format_mean(value))
        judges.add_section()
    pairs = Table("result", "judges", "mean", title=f"{results['num_shared']} problems with all clusterings")
    for name, (title, _) in PAIR_COLUMNS.items():
        for pair in results["pairs"]:
            if name in pair:
                pairs.add_row(title, f"{pair['first']}, {pair['second']}", format_mean(pair[name]))
        pairs.add_section()
    return [judges, pairs] if results["pairs"] else [judges]


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
