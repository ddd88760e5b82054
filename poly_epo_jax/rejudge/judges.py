"""Opens the judges and the reference of a comparison, and requests the clusterings of each judge.

A judge clusters each problem once for each variant: the recorded order of the responses with seed 0, the same order
with other seeds, and other orders with seed 0. Clusters are always stored in the recorded order of the responses. Each
clustering is written when it completes, so that a killed command resumes.

Files in the folder of a judge:
about.json           judge and digests of its model and the problems, see `evaluate.folder.open_folder`
clusterings.jsonl    one row per problem and variant, with the columns of `CLUSTERING`
timing.jsonl         one row per request: `seconds`, and the counters of the judge since the previous row
clusters.csv         cluster sheet, see sheets.py
"""

import asyncio
import math
import re
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.judges import JUDGES, judge_identity
from poly_epo_jax.judges.capacity import CHARS_PER_TOKEN, warn_capacity
from poly_epo_jax.judges.variants import Variant, permutation
from poly_epo_jax.records.progress import progress_bar
from poly_epo_jax.records.recorded_groups import RecordedGroup
from poly_epo_jax.rejudge.results import RECORDED, REFERENCE, Clusters, Rows
from poly_epo_jax.rejudge.sheets import read_sheet
from poly_epo_jax.rollouts.returned_values import checked_clustering, checked_counts
from poly_epo_jax.startup.command_line import KEY, with_overrides
from poly_epo_jax.system.digests import json_digest, option_digests
from poly_epo_jax.system.json_files import Columns, Row, append_rows, keep_rows, read_rows, sort_rows
from poly_epo_jax.system.output_folder import user_path
from poly_epo_jax.types import Clustering, Judge, JudgeFailure, JudgeLoad

CLUSTERINGS, TIMING = "clusterings.jsonl", "timing.jsonl"

CLUSTERING: Columns = {
    "problem": str,  # name of the group
    "seed": int,
    "order": int,
    "clusters": list | None,  # null if the judge failed
    "rationales": list | None,
    "failure": str | None,  # kind of the failure
    "reason": str | None,  # reason of the failure
}
"""Columns of clusterings.jsonl. Problem, seed and order together identify a row."""

REQUESTED_AGAIN = ("unreachable", "unavailable", "limited")
"""Kinds of failures without a reply, which say nothing about the judge. A rerun of the command requests them again."""

_JUDGE = re.compile(r"(?:(?P<label>[^:=]*)=)?(?P<name>[^:=]+)(?::(?P<keys>.*))?", re.DOTALL)


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


def read_reference(text: str, labels: Collection[str], groups: Sequence[RecordedGroup]) -> Clusters | str | None:
    """Returns the clusters in a sheet, the label of a judge, or None for an empty text.

    Args:
      text: Value of --reference.
      labels: Labels of the judges.
      groups: All groups.

    Raises:
      ValueError, OSError: If the value is neither a label nor a sheet with clusters of the groups.
    """
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


def describe(config: Config, judge: Judge, groups: Sequence[RecordedGroup]) -> dict[str, Any]:
    """Waits for the server of a judge, and returns the content of about.json.

    Args:
      config: Configuration of the judge.
      judge: The judge.
      groups: All groups, whose texts the description identifies.
    """
    section, identity = config.judge, asyncio.run(judge_identity(judge))
    problems = json_digest([(group.name, group.problem.prompt, group.responses) for group in groups])
    return {
        "judge": {"name": section.name, "model": section.model, "options": dict(section.options)},
        "digests": {**option_digests("judge.options", section.options), **identity, "problems": problems},
    }


def request_clusterings(
    folder: Path, judge: Judge, groups: Sequence[RecordedGroup], wanted: Sequence[Variant], max_concurrent: int
) -> None:
    """Requests the missing clusterings of a judge and shows the progress.

    Warns if the longest group does not fit into the judge's context.

    Args:
      folder: Folder of the judge.
      judge: The judge.
      groups: All groups.
      wanted: Variants of the requests.
      max_concurrent: Maximum number of concurrent requests.
    """
    prompts = [group.problem.prompt for group in groups]
    responses = [response for group in groups for response in group.responses]
    tokens = [math.ceil(max(map(len, texts)) / CHARS_PER_TOKEN) for texts in (prompts, responses)]

    async def work(show: Callable[[int], None]) -> None:
        num_turns = max(len(turns) // 2 + 1 for group in groups for turns in group.turns or ((),))
        await warn_capacity(
            judge, JudgeLoad(max(len(group.responses) for group in groups), *tokens, num_turns=num_turns)
        )
        await judge_groups(folder, judge, groups, wanted, max_concurrent, show)

    with progress_bar(f"{folder.name}: requests", len(groups) * len(wanted)) as show:
        asyncio.run(work(show))


async def judge_groups(
    folder: Path,
    judge: Judge,
    groups: Sequence[RecordedGroup],
    wanted: Sequence[Variant],
    max_concurrent: int,
    show: Callable[[int], None],
) -> None:
    """Requests the missing clusterings of a judge, and sorts clusterings.jsonl.

    Args:
      folder: Folder of the judge.
      judge: The judge.
      groups: All groups.
      wanted: Variants of the requests.
      max_concurrent: Maximum number of concurrent requests.
      show: Called with the number of completed requests.

    Raises:
      ValueError: If the judge returns an invalid value, or clusterings.jsonl is corrupted.
    """
    path = folder / CLUSTERINGS
    keep_rows(path, CLUSTERING, lambda row: row["failure"] not in REQUESTED_AGAIN)
    places = {group.name: place for place, group in enumerate(groups)}
    complete = {(row["problem"], Variant(row["seed"], row["order"])) for row in read_rows(path, CLUSTERING)}
    missing = [(group, variant) for group in groups for variant in wanted if (group.name, variant) not in complete]
    num_complete = len(groups) * len(wanted) - len(missing)
    show(num_complete)
    slots = asyncio.Semaphore(max_concurrent)

    async def request(group: RecordedGroup, variant: Variant) -> None:
        nonlocal num_complete
        async with slots:
            start = time.monotonic()
            row = await request_clustering(judge, group, variant)
            timing: Row = {"problem": group.name, **variant._asdict(), "seconds": time.monotonic() - start}
            # If the process is killed between the two writes, the request is repeated, and each request has its timing.
            append_rows(folder / TIMING, [timing | await checked_counts(judge)])
            append_rows(path, [row])
        num_complete += 1
        show(num_complete)

    running = [asyncio.create_task(request(group, variant)) for group, variant in missing]
    try:
        await asyncio.gather(*running)
    finally:
        for one in running:
            one.cancel()
    # Requests complete in arbitrary order. Sorting makes the file independent of this order.
    sort_rows(path, CLUSTERING, lambda row: (places[row["problem"]], row["seed"], row["order"]))


def read_clusterings(folder: Path) -> Rows:
    """Reads clusterings.jsonl in the folder of a judge.

    Raises:
      ValueError: If a row is corrupted.
    """
    found: dict[Variant, dict[str, Row]] = {}
    for row in read_rows(folder / CLUSTERINGS, CLUSTERING):
        found.setdefault(Variant(row["seed"], row["order"]), {})[row["problem"]] = row
    return found


def timing_summary(folder: Path) -> dict[str, float]:
    """Summarizes timing.jsonl in the folder of a judge.

    Returns:
      "requests", "seconds" (mean time of a request, including its retries), and the sum of each counter of the judge.

    Raises:
      ValueError: If a row is corrupted.
    """
    rows = list(read_rows(folder / TIMING, {"seconds": int | float}))
    counters = sorted({name for row in rows for name in row} - {"problem", "seed", "order", "seconds"})
    sums = {name: float(sum(row.get(name, 0) for row in rows)) for name in ("seconds", *counters)}
    return {"requests": float(len(rows)), **sums, "seconds": sums["seconds"] / max(len(rows), 1)}


async def request_clustering(judge: Judge, group: RecordedGroup, variant: Variant) -> Row:
    """Requests one clustering, and returns a row with the columns of `CLUSTERING`.

    Args:
      judge: The judge.
      group: The group.
      variant: Seed of the judge, and order in which it receives the responses.

    Raises:
      ValueError: If the judge returns an invalid value.
    """
    order = permutation(group.name, variant.order, len(group.responses))
    permuted = group.group(variant.seed, order.tolist())
    outcome = checked_clustering(judge, permuted, await judge.cluster(permuted))
    row: Row = {**dict.fromkeys(CLUSTERING), "problem": group.name, **variant._asdict()}
    places = np.argsort(order)  # place of each recorded response in the request
    if isinstance(outcome, JudgeFailure):
        row |= {"failure": outcome.kind, "reason": outcome.reason}
    elif isinstance(outcome, Clustering):
        row["clusters"] = outcome.ids[places].tolist()
        row["rationales"] = outcome.rationales and [outcome.rationales[place] for place in places]
    return row
