"""Builds the summary sentences and tables of a report, as HTML, including configurations and versions of runs."""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from poly_epo_jax.check_run.bands import differing_keys, find_bands, summary
from poly_epo_jax.config.section import flat
from poly_epo_jax.metrics import evaluation, logged
from poly_epo_jax.report import figures
from poly_epo_jax.report.document import interval_cell, table, text_table
from poly_epo_jax.report.evaluation_figures import Evaluations, LineStyles, curve, is_comparable, model_labels
from poly_epo_jax.report.folders import RunRecords

MAIN = (evaluation.PASS, evaluation.MEAN_REWARD, evaluation.CORRECT_CLUSTERS)
"""Evaluation metrics, without k, of the first table of a benchmark."""
STEPS_AVERAGED = 10
BOOTSTRAP = "95% bootstrap intervals over problems"
"""Intervals of evaluations whose results.json does not name them."""


def run_summary(label: str, rows: figures.Rows) -> str:
    """Summarizes the change of the held-out metrics during a run in one HTML sentence.

    Args:
      label: Label of the run.
      rows: Rows of metrics.jsonl.
    """
    name, changes = f"<b>{html.escape(label)}</b>", dict[str, list[str]]()
    for metric in figures.COMPARED:
        at_steps, values = figures.series(rows, metric)
        if len(at_steps):
            entry, steps = logged.describe(metric), f"from step {at_steps[0]} to step {at_steps[-1]}"
            text = f"{entry.title}: {values[0]:.{entry.digits}f} → {values[-1]:.{entry.digits}f}"
            changes.setdefault(steps, []).append(text)
    if not changes:
        return f"{name}: not evaluated up to step {rows[-1]['step']}."
    return f"{name}: {'; '.join(', '.join([*texts, steps]) for steps, texts in changes.items())}."


def bands_section(runs: Mapping[str, RunRecords]) -> str:
    """Returns HTML with the comparison of each run with the bands of its task and method, see check_run/bands.py.

    Args:
      runs: Runs by label, each with a configuration.
    """
    parts = []
    for label, run in runs.items():
        bands = find_bands(run.config)
        compared = bands.compare(run.metrics) if bands else []
        changed = ", ".join(differing_keys(run.config, bands.config)) if bands else ""
        text = f"{summary(bands, compared)}{changed and f' Keys that differ from the recipe: {changed}.'}"
        parts.append(f"<p><b>{html.escape(label)}</b>: {html.escape(text)}</p>")
        if compared:
            rows = text_table(["step", "metric", "value", "band", ""], [one.cells() for one in compared])
            parts.append(f"<details><summary>Values and bands</summary>{rows}</details>")
    return f"<section id='bands'><h2>Bands of the recipe</h2>{''.join(parts)}</section>" if parts else ""


def evaluation_summaries(evaluations: Evaluations) -> list[str]:
    """Returns HTML sentences that compare each further model with the first, as means over their shared benchmarks.

    If there is only one model, the result is a single sentence with the values of this model.
    """
    first, *others = model_labels(evaluations)
    return [_comparison_sentence(first, other, evaluations) for other in others or [first]]


def _comparison_sentence(first: str, other: str, evaluations: Evaluations) -> str:
    shared = {
        benchmark: (models[first], models[other])
        for benchmark, models in evaluations.items()
        if first in models and other in models and is_comparable(models[first], models[other])
    }
    changes = []
    for metric in (evaluation.PASS, evaluation.CORRECT_CLUSTERS):
        curves = [[curve(side, metric) for side in pair] for pair in shared.values()]
        ks = set.intersection(*(set(side) for pair in curves for side in pair)) if curves else set()
        for k in sorted({min(ks), max(ks)} if metric == evaluation.PASS else {max(ks)}) if ks else ():
            means = [sum(pair[side][k].mean for pair in curves) / len(curves) for side in (0, 1)]
            entry = evaluation.describe(evaluation.at(metric, k))
            values = [f"{mean:.{entry.digits}f}" for mean in means]
            changes.append(f"{entry.title}: {' → '.join(values if first != other else values[:1])}")
    name = f"<b>{html.escape(other)}</b>" + (f" instead of {html.escape(first)}" if first != other else "")
    where = f"on {html.escape(next(iter(shared)))}" if len(shared) == 1 else f"means over {len(shared)} benchmarks"
    return (
        f"{name}: {', '.join(changes)}, {where}." if changes else f"{name}: no shared benchmark with the same settings."
    )


def results_tables(evaluations: Evaluations, line_styles: LineStyles) -> str:
    """Returns HTML with two tables per benchmark: one row per model, one column per metric with its interval.

    The second table, with the metrics that are not in `MAIN`, is collapsed.

    Args:
      evaluations: Results by benchmark and model.
      line_styles: Line style of each model, whose color marks its row.
    """
    tables, shown = [], {}
    for benchmark, models in evaluations.items():
        columns = evaluation.table_columns((name for one in models.values() for name in one["metrics"]), "report")
        shown |= columns
        main = {name: metric for name, metric in columns.items() if evaluation.split(name)[0] in MAIN}
        others = {name: metric for name, metric in columns.items() if name not in main}
        more = f"<details><summary>Other metrics</summary>{_table(models, others, line_styles)}</details>"
        sizes = {(one["num_problems"], one["num_generations"], len(one.get("failed", ()))) for one in models.values()}
        size = " or ".join(
            f"{problems} problems, {generations} generations each"
            + f" ({failed} further problems failed)" * bool(failed)
            for problems, generations, failed in sorted(sizes)
        )
        note = html.escape(evaluation.omissions(list(models.values())))
        if not all(is_comparable(one, next(iter(models.values()))) for one in models.values()):
            note += " Not all models were evaluated on the same problems, with the same grader and sampling parameters."
        tables.append(
            f"<h3>{html.escape(benchmark)} <span class='muted'>{size}</span></h3>{_table(models, main, line_styles)}"
            f"{more if others else ''}<p class='muted'>{note}</p>"
        )
    notes = dict.fromkeys(one.get("intervals", BOOTSTRAP) for models in evaluations.values() for one in models.values())
    note = f"<p class='muted'>Means over problems, with {html.escape('. Others: '.join(notes))}.</p>"
    meanings = metric_list((metric.title, metric.meaning) for metric in shown.values())
    return f"<section><h2>Results</h2>{''.join(tables)}{note}{meanings}</section>" if tables else ""


def _table(
    models: Mapping[str, Mapping[str, Any]], columns: Mapping[str, evaluation.EvaluationMetric], line_styles: LineStyles
) -> str:
    looks = {model: f"look{figures.COLORS.index(line_styles[model]['color'])}" for model in models}
    rows = [
        [
            f'<span class="swatch {looks[model]}"></span>{html.escape(model)}',
            *(interval_cell(results["metrics"].get(name), metric.digits) for name, metric in columns.items()),
        ]
        for model, results in models.items()
    ]
    return table(["model", *(html.escape(metric.title) for metric in columns.values())], rows, "results")


def metric_list(metrics: Iterable[tuple[str, str]]) -> str:
    """Returns an HTML list with titles and meanings of metrics. Metrics without a meaning are left out."""
    named = [(html.escape(title), html.escape(meaning)) for title, meaning in metrics if meaning]
    entries = [f"<li><b>{title}</b>: {meaning}</li>" for title, meaning in named]
    return f"<ul class='meanings'>{''.join(entries)}</ul>" if entries else ""


def metrics_table(finals: Mapping[str, Mapping[str, float]]) -> str:
    """Returns an HTML section with a table of the final values of all metrics, by run.

    Args:
      finals: Result of `final_values` by run.
    """

    def natural(metric: str) -> list[Any]:
        words_and_numbers = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", metric)]
        return [not logged.is_held_out(metric), "/" in metric, *words_and_numbers]

    rows = [
        [
            html.escape(metric),
            *(f"{values[metric]:.4g}" if metric in values else "-" for values in finals.values()),
            html.escape(logged.describe(metric).meaning),
        ]
        for metric in sorted({metric for values in finals.values() for metric in values}, key=natural)
    ]
    header = ["metric", *map(html.escape, finals), "meaning"]
    return (
        "<section><h2>Final metrics of the runs</h2><p class='muted'>Held-out metrics are from the last "
        f"evaluation. Other metrics are means over the last {STEPS_AVERAGED} steps that logged them.</p>"
        f"<details><summary>All metrics</summary>{table(header, rows)}</details>"
        "</section>"
    )


def final_values(rows: figures.Rows) -> dict[str, float]:
    """Returns the final values of the metrics of a run.

    Held-out metrics are from the last evaluation. Other metrics are means over the last `STEPS_AVERAGED` steps that
    logged them.
    """
    values = {}
    for metric in {key for row in rows for key in row if key != "step"}:
        _, found = figures.series(rows, metric)
        if len(found):
            values[metric] = float(found[-1] if logged.is_held_out(metric) else found[-STEPS_AVERAGED:].mean())
    return values


def settings_section(
    configs: Mapping[str, Mapping[str, Any]], versions: Mapping[str, Sequence[Mapping[str, str]]]
) -> str:
    """Returns HTML with differing and shared configuration keys and the versions of runs.

    Args:
      configs: Configurations by run. Empty configurations are ignored. If all are empty, the section is empty.
      versions: Versions by run, see system/versions.py.
    """
    tables = {label: flat(config) for label, config in configs.items() if config}
    if not tables:
        return ""
    first = next(iter(tables.values()))
    all_keys = dict.fromkeys(key for values in tables.values() for key in values)
    keys = [key for key in all_keys if any(values.get(key) != first.get(key) for values in tables.values())]
    rows = [[label, *(_value_text(values.get(key)) for key in keys)] for label, values in tables.items()]
    differences = ""
    if keys:
        summary = f"Differing configuration keys of {len(tables)} runs: {html.escape(', '.join(keys))}"
        differences = f"<details><summary>{summary}</summary>{text_table(['run', *keys], rows)}</details>"
    elif len(tables) > 1:
        differences = "<p>All runs have the same configuration.</p>"
    shared = text_table(
        ["key", "value"], [[key, _value_text(value)] for key, value in first.items() if key not in keys]
    )
    return (
        '<section id="settings"><h2>Configuration and versions</h2>'
        '<p class="muted">Results of runs are comparable if their configurations differ only in the compared keys. '
        f"Folder paths are omitted.</p>{differences}"
        f"<details><summary>{'Shared configuration' if len(tables) > 1 else 'Configuration'}</summary>{shared}"
        f"</details>{_versions_table(versions)}</section>"
    )


def _versions_table(versions: Mapping[str, Sequence[Mapping[str, str]]]) -> str:
    """Returns an HTML table with a row per distinct set of versions and the runs that were trained with it."""
    runs_of: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for label, used in versions.items():
        for one in used:
            runs_of.setdefault(tuple((str(name), str(value)) for name, value in one.items()), []).append(label)
    if not runs_of:
        return '<p class="muted">The runs do not record the versions that they were trained with.</p>'
    names = list(dict.fromkeys(name for used in runs_of for name, _ in used))
    everyone = sum(bool(used) for used in versions.values())
    rows = [
        [
            f"all {everyone} runs" if len(labels) == everyone > 1 else ", ".join(labels),
            *(dict(used).get(name, "") or "-" for name in names),
        ]
        for used, labels in runs_of.items()
    ]
    several = "" if len(runs_of) == 1 else "<p><b>Not all steps were trained with the same versions.</b></p>"
    note = '<p class="muted">A commit that ends in + had uncommitted changes.</p>'
    return f"{several}{text_table(['runs', *names], rows)}{note}"


def _value_text(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
