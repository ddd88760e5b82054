"""Writes the page of a comparison of judges: tables, and the responses of each problem by cluster."""

import html
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from poly_epo_jax.metrics.agreement import adjusted_rand_index, degenerate_as_singletons
from poly_epo_jax.rejudge.inputs import RecordedGroup
from poly_epo_jax.rejudge.results import Clusters
from poly_epo_jax.report.build import MAX_GENERATION_BYTES
from poly_epo_jax.report.document import asset, document, table
from poly_epo_jax.report.generations import bound, rows_collection
from poly_epo_jax.system.json_files import Row
from poly_epo_jax.types import DEGENERATE_CLUSTER

JUDGE_COLUMNS = {
    "valid": ("valid", "Fraction of problems with a valid clustering, which includes retried requests."),
    "degenerate": ("degenerate", "Fraction of responses in the degenerate cluster, 100."),
    "clusters": ("clusters", "Number of distinct clusters per problem, without the degenerate cluster."),
    "seed_agreement": (
        "agreement between seeds",
        "Adjusted Rand index of the clusterings with different seeds of the judge. 1: the seed has no effect.",
    ),
    "order_sensitivity": (
        "sensitivity to order",
        "1 minus the adjusted Rand index of the clusterings of permuted responses. 0: the order has no effect. For a "
        "judge that samples, compare it with 1 minus the agreement between seeds.",
    ),
}
"""Title and meaning of the results of a judge."""

PAIR_COLUMNS = {
    "adjusted_rand_index": (
        "adjusted Rand index",
        "Agreement on the pairs of responses that share a cluster, adjusted for chance: 1 for equal clusterings, 0 for "
        "random ones. Each degenerate response is its own cluster.",
    ),
    "v_measure": (
        "V-measure",
        "Harmonic mean of homogeneity and completeness. It is not adjusted for chance. Each degenerate response is its "
        "own cluster.",
    ),
    "rank_correlation": (
        "rank correlation",
        "Spearman correlation of the advantages of a problem's responses, over the problems whose advantages are not "
        "all equal.",
    ),
    "sign_changes": (
        "sign changes",
        "Fraction of responses whose advantage has another sign (positive, 0 or negative).",
    ),
}
"""Title and meaning of the results of a pair of judges."""


def format_mean(value: Mapping[str, Any] | None, interval: str = " [{}, {}]") -> str:
    """Returns a mean with its interval, or "-" without values.

    Args:
      value: Mean with its bounds, see `results.judge_results`.
      interval: Format of the bounds.
    """
    if value is None:
        return "-"
    bounds = "" if value["low"] is None else interval.format(f"{value['low']:.3f}", f"{value['high']:.3f}")
    return f"{value['mean']:.3f}{bounds}"


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
    ordered = sorted(groups, key=lambda group: _agreement(group.name, judged))
    collections = [
        rows_collection(label, "all responses", path.parent, _generations(ordered, clusters, rows.get(label, {})))
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
        "Below, the problems on which the judges agree least are the first.</p>",
        asset("browser.html"),
    ]
    data = {"collections": collections, "bounds": vars(bounds), "degenerate": DEGENERATE_CLUSTER}
    page = document(f"Judges: {', '.join(results['judges'])}", "\n".join(body), data)
    path.write_text(page, encoding="utf-8", errors="replace")


def _judges_section(judges: Mapping[str, Any], timings: Mapping[str, Mapping[str, float]]) -> str:
    counters = list(dict.fromkeys(name for timing in timings.values() for name in timing))
    header = ["judge", *(title for title, _ in JUDGE_COLUMNS.values()), "failures"]
    cells = []
    for label, found in judges.items():
        failures = ", ".join(f"{kind}: {count}" for kind, count in found["failures"].items()) or "-"
        cells.append([html.escape(label), *(_cell(found[name]) for name in JUDGE_COLUMNS), html.escape(failures)])
    times = [
        [html.escape(label), *(f"{timing[name]:.4g}" if name in timing else "-" for name in counters)]
        for label, timing in timings.items()
    ]
    configured = [[html.escape(label), html.escape(str(found["judge"]))] for label, found in judges.items()]
    return (
        f"<section><h2>Judges</h2>{table(header, cells)}{_meanings(JUDGE_COLUMNS)}"
        f"<h3>Time</h3>{table(['judge', *map(html.escape, counters)], times)}"
        "<p class='muted'>Mean seconds per request with its retries, and counters of the judge for all requests.</p>"
        f"<details><summary>Settings of the judges</summary>{table(['judge', 'settings'], configured)}</details>"
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
            *(_cell(pair[name]) for name in shown),
        ]
        for pair in pairs
    ]
    header = ["judges", "problems", *(title for title, _ in shown.values())]
    note = f"<p class='muted'>Advantages of {html.escape(method)}.</p>" if method else ""
    return f"<section><h2>Agreement</h2>{table(header, cells)}{_meanings(shown)}{note}</section>"


def _cell(value: Mapping[str, Any] | None) -> str:
    return format_mean(value, "<span class='interval'>{} to {}</span>")


def _meanings(columns: Mapping[str, tuple[str, str]]) -> str:
    entries = [f"<li><b>{html.escape(title)}</b>: {html.escape(meaning)}</li>" for title, meaning in columns.values()]
    return f"<ul class='meanings'>{''.join(entries)}</ul>"


def _agreement(name: str, judged: Mapping[str, Clusters]) -> float:
    """Returns the mean adjusted Rand index of all pairs of clusterings of a group, or 1 without pairs."""
    found = [degenerate_as_singletons(clusters[name]) for clusters in judged.values() if name in clusters]
    values = [adjusted_rand_index(first, second) for first, second in combinations(found, 2)]
    return sum(values) / len(values) if values else 1.0


def _generations(groups: Sequence[RecordedGroup], clusters: Clusters, rows: Mapping[str, Row]) -> list[Row]:
    """Returns rows with the columns of `records.run_folder.GENERATION`."""
    found = []
    for group in groups:
        nothing = [None] * len(group.responses)
        ids = clusters[group.name].tolist() if group.name in clusters else nothing
        rationales = rows.get(group.name, {}).get("rationales") or nothing
        for number, response in enumerate(group.responses):
            found.append(
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
            )
    return found
