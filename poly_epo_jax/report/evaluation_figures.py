"""Draws pass@k, majority voting and branching from the content of results.json (paper §6.1).

`Evaluations` maps benchmark and model label to results. `line_styles` is the result of `figures.styles` for all labels
of the report, so that a model has the same color in all figures.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from poly_epo_jax.metrics.evaluation import MAJORITY_ACCURACY, MAJORITY_VOTE_SHARE, PASS, at, powers_of_two, split
from poly_epo_jax.metrics.intervals import Interval, difference_interval
from poly_epo_jax.metrics.logged import held_out
from poly_epo_jax.metrics.pass_at_k import pass_at_k
from poly_epo_jax.report import figures

Results = Mapping[str, Any]
Evaluations = Mapping[str, Mapping[str, Results]]
LineStyles = Mapping[str, Mapping[str, Any]]

K_LABEL = "k (attempts)"
_PANEL = (3.4, 2.8)


def model_labels(evaluations: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the labels of all models, in order of first occurrence."""
    return list(dict.fromkeys(model for models in evaluations.values() for model in models))


def is_comparable(results: Results, others: Results) -> bool:
    """Returns True if two models were evaluated on the same problems, with the same grader and sampling parameters."""

    def settings(one: Results) -> tuple[Any, Any, dict[str, Any]]:
        digests = one.get("digests", {})
        return digests.get("problems"), digests.get("grader"), {**one.get("sampling", {}), "seed": None}

    return settings(results) == settings(others)


def curve(results: Results, metric: str) -> dict[int, Interval]:
    """Returns the mean and interval of a metric at each k, in ascending order of k.

    Args:
      results: Content of results.json.
      metric: Name of the metric, without k.
    """
    points = [(*split(name), Interval.read(value)) for name, value in results["metrics"].items()]
    return dict(sorted((k, interval) for stem, k, interval in points if stem == metric and k is not None))


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
    evaluations: Evaluations, line_styles: LineStyles, panel_size: tuple[float, float] = _PANEL
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

    return _benchmark_panels(evaluations, line_styles, _draw, finish, panel_size)


def _draw(axes: Axes, results: Results, style: Mapping[str, Any]) -> None:
    draw_pass_at_k(axes, curve(results, PASS), {**figures.MARKED, **style})


def plot_held_out_pass_at_k(runs: figures.Runs) -> Figure | None:
    """Draws pass@k of the last evaluation of each run and of its base policy. Returns None if no run has it.

    Base policies are evaluated before the first step. Equal results of several runs are drawn once. The largest k is
    left out: pass@k of all generations is the fraction of solved problems, which single generations decide.
    """
    last, bases = {label: last_evaluation(rows) for label, rows in runs.items()}, dict[str, Results]()
    if not any(results["metrics"] for results in last.values()):
        return None
    for label, rows in runs.items():
        base = last_evaluation([row for row in rows if row["step"] == 0])
        if base["metrics"] and base not in (last[label], *bases.values()):
            bases[f"base of {label}"] = base
    if len(bases) == 1:
        bases = {"base": bases.popitem()[1]}
    shown = {label: _without_largest_k(results) for label, results in (last | bases).items()}
    return plot_pass_at_k(
        {"Held-out pass@k at the last evaluation": shown}, figures.styles(list(shown)), panel_size=(6.5, 3.8)
    )


def _without_largest_k(results: Results) -> Results:
    points = results["metrics"]
    largest = max(points, key=lambda name: split(name)[1] or 0, default="")
    return {"metrics": {name: value for name, value in points.items() if name != largest or len(points) == 1}}


def last_evaluation(rows: figures.Rows) -> Results:
    """Returns pass@k of the last row of a run that has it, in the form of results.json."""
    prefix = held_out(f"{PASS}@")
    for row in reversed(rows):
        if found := {name: value for name, value in row.items() if name.startswith(prefix) and value is not None}:
            return {"metrics": {name.removeprefix(held_out("")): {"mean": value} for name, value in found.items()}}
    return {"metrics": {}}


def paired_differences(evaluations: Evaluations) -> Evaluations:
    """Returns the differences in pass@k of each further model from the first model of the report.

    Differences are computed for each problem that both models have, so the difficulty of the problems cancels. Models
    that are not comparable are left out. The 95% interval of a mean difference is that of `difference_interval`. It can
    exclude 0 although the intervals of the two models overlap.

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
        if first in by_model
        and (others := [one for one in models[1:] if one in by_model and is_comparable(by_model[one], by_model[first])])
    }


def _paired_pass_at_k(results: Results, baseline: Results) -> dict[str, dict[str, float | None]]:
    """Returns the mean difference in pass@k with its interval, at powers of two and at the largest common k.

    Problems with fewer than k generations are left out at k.
    """
    theirs = {row["problem"]: row for row in baseline["per_problem"]}
    pairs = [(row, theirs[row["problem"]]) for row in results["per_problem"] if row["problem"] in theirs]
    sizes = [min(row["num_generations"] for row in pair) for pair in pairs]
    largest, found = max(sizes, default=0), {}
    for k in sorted({*powers_of_two(largest), largest} - {0}):
        passed = [
            [pass_at_k(row["num_generations"], np.array([row["num_correct"]]), k).item() for row in pair]
            for pair, size in zip(pairs, sizes, strict=True)
            if size >= k
        ]
        values = np.subtract(*np.transpose(passed))
        low, high = map(float, difference_interval(values)) if len(values) > 1 else (None, None)
        found[at(PASS, k)] = {"mean": float(values.mean()), "low": low, "high": high}
    return found


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


def plot_majority(evaluations: Evaluations, line_styles: LineStyles) -> Figure | None:
    """Draws the accuracy of the majority answer of k generations over its vote share. Returns None without results.

    Lines begin at k = 1, where the vote share is 1 if all generations have an answer.

    Args:
      evaluations: Results by benchmark and model.
      line_styles: Line style of each model.
    """

    def draw(axes: Axes, results: Results, style: Mapping[str, Any]) -> None:
        votes = curve(results, MAJORITY_VOTE_SHARE)
        shares = [point.mean for point in votes.values()]
        accuracies = [point.mean for point in curve(results, MAJORITY_ACCURACY).values()]
        axes.plot(shares, accuracies, **figures.MARKED, **style)
        if votes and not axes.texts:  # one label per panel: all lines end at the same k
            text, position = f"k = {max(votes)}", (shares[-1], accuracies[-1])
            axes.annotate(text, position, (0, 6), textcoords="offset points", ha="center", fontsize=8).set(
                color=style["color"], path_effects=[withStroke(linewidth=2.5, foreground="white")]
            )

    def finish(axes: Axes) -> None:
        axes.set_xlabel("vote share of the majority answer")
        axes.set_ylabel("majority@k accuracy")
        figures.unit_axis(axes, "x", "y")

    return _benchmark_panels(evaluations, line_styles, draw, finish)


def plot_branches(evaluations: Evaluations, line_styles: LineStyles) -> Figure | None:
    """Draws the mean number of active branches by token position on a log2 axis. Returns None without results.

    Args:
      evaluations: Results by benchmark and model.
      line_styles: Line style of each model.
    """

    def draw(axes: Axes, results: Results, style: Mapping[str, Any]) -> None:
        means = results["branching"]["mean"]
        axes.plot(range(1, len(means) + 1), means, linewidth=2.2, **style)

    def finish(axes: Axes) -> None:
        log2_axis(axes, "token position")
        axes.set_ylabel("active branches (mean)")
        axes.set_ylim(bottom=0)

    return _benchmark_panels(evaluations, line_styles, draw, finish)


def _benchmark_panels(
    evaluations: Evaluations,
    line_styles: LineStyles,
    draw: Callable[[Axes, Results, Mapping[str, Any]], None],
    finish: Callable[[Axes], None],
    panel_size: tuple[float, float] = _PANEL,
) -> Figure | None:
    """Draws a panel for each benchmark, with a legend of the models. Returns None if there are no results.

    Args:
      evaluations: Results by benchmark and model.
      line_styles: Line style of each model.
      draw: Draws the results of a model in the panel of a benchmark, with the line style of the model.
      finish: Labels and limits the axes of a panel, after all models are drawn.
      panel_size: Width and height of a panel, in inches.
    """
    if not evaluations:
        return None
    with figures.panels(len(evaluations), 3, panel_size) as (figure, panels):
        for axes, (benchmark, models) in zip(panels, evaluations.items(), strict=True):
            for model, results in models.items():
                draw(axes, results, line_styles[model])
            axes.set_title(benchmark)
            finish(axes)
        present = model_labels(evaluations)
        figures.add_legend(figure, {label: style for label, style in line_styles.items() if label in present})
    return figure


def log2_axis(axes: Axes, label: str) -> None:
    """Sets a logarithmic x-axis with the label `label` and at most seven ticks, at powers of two."""
    axes.set_xscale("log", base=2)
    longest = max((float(np.max(np.asarray(line.get_xdata(), float), initial=1)) for line in axes.lines), default=1.0)
    powers = range(int(math.log2(max(longest, 1))) + 1)
    thinned = powers[:: -(-len(powers) // 7)]
    axes.set_xticks([2**power for power in thinned], [str(2**power) for power in thinned])
    axes.minorticks_off()
    axes.set_xlabel(label)
