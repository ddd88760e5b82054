"""Requests the clusterings of a judge and writes each of them when it completes, so that a killed command resumes.

A judge clusters each problem once for each variant: the recorded order of the responses with seed 0, the same order
with other seeds, and other orders with seed 0. Clusters are always stored in the recorded order of the responses.

Files in the folder of a judge:
about.json           judge and digests of its model and the problems, see `evaluate.folder.open_folder`
clusterings.jsonl    one row per problem and variant, with the columns of `CLUSTERING`
timing.jsonl         one row per request: `seconds`, and the counters of the judge since the previous row
clusters.csv         cluster sheet, see sheets.py
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from poly_epo_jax.judges.variants import Variant, permutation
from poly_epo_jax.records.recorded_groups import RecordedGroup
from poly_epo_jax.rollouts.returned_values import checked_clustering, checked_counts
from poly_epo_jax.system.json_files import Columns, Row, append_rows, keep_rows, read_rows, sort_rows
from poly_epo_jax.types import Clustering, HasMetrics, Judge, JudgeFailure

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
            counts = checked_counts(judge, judge.metrics(), {}) if isinstance(judge, HasMetrics) else {}
            # If the process is killed between the two writes, the request is repeated, and each request has its timing.
            append_rows(folder / TIMING, [timing | counts])
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
