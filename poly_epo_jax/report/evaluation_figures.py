"""Draws majority voting and branching from the content of results.json, and panels of benchmarks (paper §6.1).

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

from poly_epo_jax.metrics.evaluation import MAJORITY_ACCURACY, MAJORITY_VOTE_SHARE, split
from poly_epo_jax.metrics.intervals import Interval
from poly_epo_jax.report import figures

Results = Mapping[str, Any]
Evaluations = Mapping[str, Mapping[str, Results]]
LineStyles = Mapping[str, Mapping[str, Any]]

PANEL = (3.4, 2.8)


def model_labels(evaluations: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the labels of all models, in order of first occurrence."""
    return list(dict.fromkeys(model for models in evaluations.values() for model in models))


def curve(results: Results, metric: str) -> dict[int, Interval]:
    """Returns the mean and interval of a metric at each k, in ascending order of k.

    Args:
      results: Content of results.json.
      metric: Name of the metric, without k.
    """
    found = {}
    for name, value in results["metrics"].items():
        stem, k = split(name)
        if stem == metric and k is not None:
            found[k] = Interval.read(value)
    return dict(sorted(found.items()))


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
            note = axes.annotate(text, position, (0, 6), textcoords="offset points", ha="center", fontsize=8)
            note.set(color=style["color"], path_effects=[withStroke(linewidth=2.5, foreground="white")])

    def finish(axes: Axes) -> None:
        axes.set_xlabel("vote share of the majority answer")
        axes.set_ylabel("majority@k accuracy")
        figures.unit_axis(axes, "x", "y")

    return benchmark_panels(evaluations, line_styles, draw, finish)


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

    return benchmark_panels(evaluations, line_styles, draw, finish)


def benchmark_panels(
    evaluations: Evaluations,
    line_styles: LineStyles,
    draw: Callable[[Axes, Results, Mapping[str, Any]], None],
    finish: Callable[[Axes], None],
    panel_size: tuple[float, float] = PANEL,
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
