"""The sentences and tables of a report on runs and evaluations, as HTML."""

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from poly_epo_jax.metrics import names
from poly_epo_jax.report import figures
from poly_epo_jax.report.document import table
from poly_epo_jax.report.evaluation_figures import Estimate, Evaluations, Results, curve, estimate, model_labels

Rows = Sequence[Mapping[str, Any]]
STEPS_AVERAGED = 10
_COLUMNS = {  # for a metric@k, the largest k
    names.at(names.PASS, 1): "pass@1",
    names.PASS: "pass@{k}",
    names.MAJORITY_ACCURACY: "majority of {k} right",
    names.MAJORITY_SHARE: "its vote share",
    names.CORRECT_CLUSTERS: "correct clusters of {k}",
    names.INCORRECT_CLUSTERS: "incorrect clusters of {k}",
    "answer_entropy": "answer entropy",
    "response_length": "tokens",
}


def run_summary(label: str, rows: Rows) -> str:
    """One sentence on how training changed the held-out metrics."""
    steps, rewards = figures.series(rows, names.HELD_OUT_REWARD)
    _, clusters = figures.series(rows, names.HELD_OUT_CORRECT_CLUSTERS)
    name = f"<b>{html.escape(label)}</b>"
    if not len(steps):
        return f"{name}: no evaluation up to step {rows[-1]['step']}."
    changes = [f"held-out reward: {rewards[0]:.3f} → {rewards[-1]:.3f}"]
    if len(clusters):
        changes.append(f"distinct correct clusters of 8: {clusters[0]:.2f} → {clusters[-1]:.2f}")
    return f"{name}: {', '.join(changes)}, from step {steps[0]} to step {steps[-1]}."


def evaluation_summaries(evaluations: Evaluations) -> list[str]:
    """A sentence that compares each model with the first, by means over the benchmarks that have both."""
    models = model_labels(evaluations)
    if len(models) == 1:
        return [_beside(models[0], models[0], evaluations)]
    return [_beside(models[0], other, evaluations) for other in models[1:]]


def _beside(first: str, other: str, evaluations: Evaluations) -> str:
    shared = {
        benchmark: (models[first], models[other])
        for benchmark, models in evaluations.items()
        if first in models and other in models
    }
    changes = []
    for metric, title in ((names.PASS, "pass@{k}"), (names.CORRECT_CLUSTERS, "distinct correct clusters of {k}")):
        curves = [[{point.k: point.mean for point in curve(side, metric)} for side in pair] for pair in shared.values()]
        ks = set.intersection(*(set(side) for pair in curves for side in pair)) if curves else set()
        for k in sorted({min(ks), max(ks)} if metric == names.PASS else {max(ks)}) if ks else ():
            means = [sum(pair[side][k] for pair in curves) / len(curves) for side in (0, 1)]
            values = [_value(metric, mean) for mean in means]
            changes.append(f"{title.format(k=k)}: {' → '.join(values if first != other else values[:1])}")
    name = f"<b>{html.escape(other)}</b>" + (f" instead of {html.escape(first)}" if first != other else "")
    where = f"on {html.escape(next(iter(shared)))}" if len(shared) == 1 else f"means over {len(shared)} benchmarks"
    return f"{name}: {', '.join(changes)}, {where}." if changes else f"{name}: nothing in common."


def results_tables(evaluations: Evaluations, labels: Sequence[str]) -> str:
    """A table per benchmark: one row per model, one column per metric with its interval."""
    tables = []
    for benchmark, models in evaluations.items():
        cells = {model: _metrics_shown(results) for model, results in models.items()}
        columns = list(dict.fromkeys(column for row in cells.values() for column in row))
        columns.sort(key=[column for row in cells.values() for column in row].index)
        rows = []
        for model, row in cells.items():
            swatch = f'<span class="swatch look{labels.index(model) % 7}"></span>'
            rows.append([f"{swatch}{html.escape(model)}", *(row.get(column, "-") for column in columns)])
        sizes = {(results["num_problems"], results["num_generations"]) for results in models.values()}
        size = " or ".join(
            f"{problems} problems, {generations} generations each" for problems, generations in sorted(sizes)
        )
        tables.append(
            f"<h3>{html.escape(benchmark)} <span class='muted'>{size}</span></h3>"
            f"{table(['model', *map(html.escape, columns)], rows, 'results')}"
        )
    note = "<p class='muted'>Means over problems; below each its 95% bootstrap interval over problems.</p>"
    return f"<section><h2>Results</h2>{''.join(tables)}{note}</section>" if tables else ""


def metrics_table(finals: Mapping[str, Mapping[str, float]]) -> str:
    """Every metric of every run at the end of the run."""

    def natural(metric: str) -> list[Any]:
        words_and_numbers = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", metric)]
        return [not names.is_held_out(metric), "/" in metric, *words_and_numbers]

    rows = [
        [html.escape(metric), *(f"{values[metric]:.4g}" if metric in values else "-" for values in finals.values())]
        for metric in sorted({metric for values in finals.values() for metric in values}, key=natural)
    ]
    return (
        "<section><h2>Final metrics of the runs</h2><p class='muted'>Held-out metrics are those of the last "
        f"evaluation; all others are means over the last {STEPS_AVERAGED} steps that logged them.</p>"
        f"<details><summary>All metrics</summary>{table(['metric', *map(html.escape, finals)], rows)}</details>"
        "</section>"
    )


def final_values(rows: Rows) -> dict[str, float]:
    """Each metric at the end of a run: from its last evaluation, or as a mean over its last `STEPS_AVERAGED` steps."""
    values = {}
    for metric in {key for row in rows for key in row if key != "step"}:
        _, logged = figures.series(rows, metric)
        if len(logged):
            values[metric] = float(logged[-1] if names.is_held_out(metric) else logged[-STEPS_AVERAGED:].mean())
    return values


def _metrics_shown(results: Results) -> dict[str, str]:
    shown = {}
    for metric, column in _COLUMNS.items():
        if metric in results["metrics"]:
            shown[column] = _cell(metric, estimate(1, results["metrics"][metric]))
            continue
        estimates = curve(results, metric)
        if estimates and (metric != names.PASS or estimates[-1].k > 1):
            shown[column.format(k=estimates[-1].k)] = _cell(metric, estimates[-1])
    return shown


def _cell(metric: str, shown: Estimate) -> str:
    _, mean, low, high = shown
    interval = "" if low is None or high is None else f"{_value(metric, low)} to {_value(metric, high)}"
    return f"{_value(metric, mean)}<span class='interval'>{interval}</span>"


def _value(metric: str, value: float) -> str:
    digits = 0 if metric == "response_length" else 2 if "clusters" in metric or "entropy" in metric else 3
    return f"{value:.{digits}f}"
