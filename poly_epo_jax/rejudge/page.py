"""Writes the page of a comparison of judges: tables, and the responses of each problem by cluster."""

import html
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from poly_epo_jax.records.recorded_groups import RecordedGroup
from poly_epo_jax.rejudge.results import JUDGE_COLUMNS, PAIR_COLUMNS, Clusters, mean_agreement
from poly_epo_jax.report.build import MAX_GENERATION_BYTES
from poly_epo_jax.report.document import asset, document, interval_cell, table, text_table
from poly_epo_jax.report.generations import bound, collect
from poly_epo_jax.report.page import metric_list
from poly_epo_jax.system.json_files import Row, replace_file
from poly_epo_jax.types import DEGENERATE_CLUSTER


def write_page(
    path: Path,
    results: Mapping[str, Any],
    timings: Mapping[str, Mapping[str, float]],
    groups: Sequence[RecordedGroup],
    judged: Mapping[str, Clusters],
    rows: Mapping[str, Mapping[str, Row]],
) -> None:
    """Writes the page.

    Args:
      path: The file.
      results: Content of results.json.
      timings: Summary of timing.jsonl by label of the judge.
      groups: All groups.
      judged: Clusters by label, including those of the input and of the reference.
      rows: Rows of clusterings.jsonl by label of the judge and name of the group, for their rationales.
    """
    pairs = list(combinations(judged.values(), 2))

    def agreement(group: RecordedGroup) -> float:
        found = mean_agreement(group.name, pairs)
        return 1.0 if found is None else found

    ordered = sorted(groups, key=agreement)
    collections = [
        collect(label, "all responses", path.parent, _generations(ordered, clusters, rows.get(label, {})))
        for label, clusters in judged.items()
    ]
    collections, bounds = bound(collections, MAX_GENERATION_BYTES)
    num_responses = sum(len(group.responses) for group in groups)
    counts = (
        f"{len(groups)} problems with {num_responses} responses. All judges have a valid clustering of "
        f"{results['num_shared']} problems, on which they are compared."
    )
    body = [
        f"<p>{counts}</p>",
        _judges_section(results["judges"], timings),
        _pairs_section(results["pairs"], results["method"]),
        "<p class='muted'>Means over problems with 95% intervals, which only include the variation between problems. "
        "Equal values have no interval. Below, the problems on which the judges agree least are the first.</p>",
        asset("browser.html"),
    ]
    replace_file(
        path,
        [
            document(
                f"Judges: {', '.join(results['judges'])}",
                "\n".join(body),
                {"collections": collections, "bounds": vars(bounds), "degenerate": DEGENERATE_CLUSTER},
            )
        ],
    )


def _judges_section(judges: Mapping[str, Any], timings: Mapping[str, Mapping[str, float]]) -> str:
    counters = list(dict.fromkeys(name for timing in timings.values() for name in timing))
    header = ["judge", *(title for title, _ in JUDGE_COLUMNS.values()), "failures"]
    cells = [
        [
            html.escape(label),
            *(interval_cell(found[name]) for name in JUDGE_COLUMNS),
            html.escape(", ".join(f"{kind}: {count}" for kind, count in found["failures"].items()) or "-"),
        ]
        for label, found in judges.items()
    ]
    times = [
        [label, *(f"{timing[name]:.4g}" if name in timing else "-" for name in counters)]
        for label, timing in timings.items()
    ]
    configured = [[label, str(found["judge"])] for label, found in judges.items()]
    return (
        f"<section><h2>Judges</h2>{table(header, cells)}{metric_list(JUDGE_COLUMNS.values())}"
        f"<h3>Time</h3>{text_table(['judge', *counters], times)}"
        "<p class='muted'>Mean seconds per request with its retries, and counters of the judge for all requests.</p>"
        f"<details><summary>Settings of the judges</summary>{text_table(['judge', 'settings'], configured)}</details>"
        "</section>"
    )


def _pairs_section(pairs: Sequence[Mapping[str, Any]], method: str | None) -> str:
    if not pairs:
        return ""
    shown = {name: column for name, column in PAIR_COLUMNS.items() if name in pairs[0]}
    cells = [
        [
            html.escape(f"{pair['first']} and {pair['second']}"),
            str(pair["num_problems"]),
            *(interval_cell(pair[name]) for name in shown),
        ]
        for pair in pairs
    ]
    header = ["judges", "problems", *(title for title, _ in shown.values())]
    note = f"<p class='muted'>Advantages of {html.escape(method)}.</p>" if method else ""
    return f"<section><h2>Agreement</h2>{table(header, cells)}{metric_list(shown.values())}{note}</section>"


def _generations(groups: Sequence[RecordedGroup], clusters: Clusters, rows: Mapping[str, Row]) -> list[Row]:
    """Returns rows with the columns of `records.run_folder.GENERATION`."""
    found = []
    for group in groups:
        nothing = [None] * len(group.responses)
        ids = clusters[group.name].tolist() if group.name in clusters else nothing
        rationales = rows.get(group.name, {}).get("rationales") or nothing
        found += [
            {
                "problem": group.name,
                "prompt": group.problem.prompt,
                "generation": number,
                "response": response,
                "reward": group.rewards[number],
                "correct": group.correct[number],
                "cluster": ids[number],
                "rationale": rationales[number],
            }
            for number, response in enumerate(group.responses)
        ]
    return found
