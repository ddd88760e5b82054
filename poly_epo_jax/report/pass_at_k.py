"""Draws pass@k of evaluations, and its difference from the first model on the same problems."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from poly_epo_jax.metrics.evaluation import PASS, at
from poly_epo_jax.metrics.intervals import Interval, bootstrap_interval
from poly_epo_jax.metrics.logged import held_out
from poly_epo_jax.metrics.pass_at_k import pass_at_k
from poly_epo_jax.report import figures
from poly_epo_jax.report.evaluation_figures import (
    PANEL,
    Evaluations,
    LineStyles,
    Results,
    benchmark_panels,
    curve,
    log2_axis,
    model_labels,
)

K_LABEL = "k (attempts)"


def draw_pass_at_k(axes: Axes, points: Mapping[int, Interval], line: Mapping[str, Any]) -> None:
    """Draws pass@k, or a difference in pass@k, with a shaded interval. Powers of two and the largest k have markers.

    Args:
      axes: Panel to draw in.
      points: Values by k. The interval of a value is not drawn if its bounds are NaN.
      line: Properties of the line and its markers.
    """
    means, lows, highs = np.array(list(points.values()), float).reshape(-1, 3).T
    marked = [index for index, k in enumerate(points) if k.bit_count() == 1 or index == len(points) - 1]
    axes.plot(list(points), means, **line, markevery=marked)
    axes.fill_between(list(points), lows, highs, color=line["color"], alpha=0.15, linewidth=0)


def plot_pass_at_k(
    evaluations: Evaluations, line_styles: LineStyles, panel_size: tuple[float, float] = PANEL
) -> Figure | None:
    """Draws pass@k over k on a log2 axis, with shaded 95% intervals. Returns None if there are no results.

    Args:
      evaluations: Results by benchmark and model.
      line_styles: Line style of each model.
      panel_size: Width and height of a panel, in inches.
    """

    def finish(axes: Axes) -> None:
        log2_axis(axes, K_LABEL)
        axes.set_ylabel("pass@k")
        figures.unit_axis(axes, "y")

    return benchmark_panels(evaluations, line_styles, _draw, finish, panel_size)


def _draw(axes: Axes, results: Results, style: Mapping[str, Any]) -> None:
    draw_pass_at_k(axes, curve(results, PASS), figures.MARKED | style)


def plot_held_out_pass_at_k(runs: figures.Runs) -> Figure | None:
    """Draws pass@k of the last evaluation during the training of each run. Returns None if no run has it."""
    last = {label: last_evaluation(rows) for label, rows in runs.items()}
    if not any(results["metrics"] for results in last.values()):
        return None
    title = "Held-out pass@k at the last evaluation"
    return plot_pass_at_k({title: last}, figures.styles(list(runs)), (6.5, 3.8))


def last_evaluation(rows: figures.Rows) -> Results:
    """Returns pass@k of the last row of a run that has it, in the form of results.json."""
    prefix = held_out(f"{PASS}@")
    for row in reversed(rows):
        if found := {name: value for name, value in row.items() if name.startswith(prefix) and value is not None}:
            return {"metrics": {name.removeprefix(held_out("")): {"mean": value} for name, value in found.items()}}
    return {"metrics": {}}


def paired_differences(evaluations: Evaluations) -> Evaluations:
    """Returns the differences in pass@k of each further model from the first model of the report.

    Differences are computed for each problem that both models have, so the difficulty of the problems cancels. The 95%
    interval of a mean difference is that of `bootstrap_interval`. It can exclude 0 although the intervals of the two
    models overlap. Differences lie in [-1, 1], twice the range of `fraction_interval`, whose intervals of 60 small
    differences would be almost twice as wide.

    Args:
      evaluations: Results by benchmark and model.

    Returns:
      Differences by benchmark and model, with the entry "metrics" of results.json.
    """
    models = model_labels(evaluations)
    first = models[0] if models else ""
    return {
        benchmark: {model: {"metrics": _paired_pass_at_k(by_model[model], by_model[first])} for model in others}
        for benchmark, by_model in evaluations.items()
        if first in by_model and (others := [model for model in models[1:] if model in by_model])
    }


def _paired_pass_at_k(results: Results, baseline: Results) -> dict[str, dict[str, float | None]]:
    """Returns the mean difference in pass@k with its interval, at powers of two and at the largest common k."""
    ours, theirs = ({row["problem"]: row for row in one["per_problem"]} for one in (results, baseline))
    shared = [problem for problem in ours if problem in theirs]
    if not shared:
        return {}
    sizes = [one["num_generations"] for one in (results, baseline)]
    ks = sorted({*(2**power for power in range(min(sizes).bit_length())), min(sizes)})
    correct = [np.array([rows[problem]["num_correct"] for problem in shared]) for rows in (ours, theirs)]
    passed = [
        np.stack([pass_at_k(size, counts, k) for k in ks], 1) for size, counts in zip(sizes, correct, strict=True)
    ]
    values = passed[0] - passed[1]
    low, high = bootstrap_interval(values) if len(shared) > 1 else ([None] * len(ks),) * 2
    bounds = zip(ks, values.mean(axis=0).tolist(), low, high, strict=True)
    return {at(PASS, k): {"mean": mean, "low": bottom, "high": top} for k, mean, bottom, top in bounds}


def plot_with_differences(evaluations: Evaluations, line_styles: LineStyles) -> Figure | None:
    """Draws pass@k over k and, to its right, the differences of `paired_differences`, with a row per benchmark.

    Returns None if there are no results. The differences are omitted if no benchmark has the first and another model.

    Args:
      evaluations: Results by benchmark and model.
      line_styles: Line style of each model.
    """
    differences = paired_differences(evaluations)
    if not differences:
        return plot_pass_at_k(evaluations, line_styles)
    models = model_labels(evaluations)
    with figures.panels(2 * len(evaluations), 2, (4.2, 3.1)) as (figure, panels):
        for index, (benchmark, by_model) in enumerate(evaluations.items()):
            left, right = panels[2 * index : 2 * index + 2]
            for axes, shown in ((left, by_model), (right, differences.get(benchmark, {}))):
                for model, results in shown.items():
                    _draw(axes, results, line_styles[model])
                log2_axis(axes, K_LABEL)
            figures.unit_axis(left, "y")
            left.set_title(f"{benchmark}: pass@k")
            right.set_title(f"pass@k minus that of {models[0]}")
            right.axhline(0, color=line_styles[models[0]]["color"], linewidth=1, zorder=0)
        figures.add_legend(figure, {model: line_styles[model] for model in models})
    return figure
