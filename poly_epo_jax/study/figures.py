"""Draws the figures of a study, except for the frontier. A method has the same color and marker in all figures."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from poly_epo_jax.metrics.intervals import Interval
from poly_epo_jax.metrics.logged import describe, is_held_out
from poly_epo_jax.report import figures
from poly_epo_jax.study.results import CORRECT_OF_8, CORRECT_OF_64, REWARD, Result, StudyResults

_MARKS = ("o", "s", "^", "D", "v", "P", "X")
_PANEL = (3.2, 2.5)
Curve = tuple[Int[np.ndarray, " T"], Float[np.ndarray, " T"]]


def line_styles(results: StudyResults) -> dict[str, dict[str, Any]]:
    """Returns the line style of each method. Later lines are thinner, so that overlapping lines remain visible."""
    styles, widest = figures.styles(results.methods), 3.4
    return {
        method: style
        | {
            "marker": _MARKS[(index + index // len(_MARKS)) % len(_MARKS)],
            "linewidth": max(widest - 2.2 * index / len(styles), 0.8),
        }
        for index, (method, style) in enumerate(styles.items())
    }


def plot_by_rate(results: StudyResults, task: str) -> Figure | None:
    """Draws the metrics of both frontier axes by learning rate, and their differences from the baseline.

    Methods are drawn side by side, so that points do not overlap. Returns None if there are no results.

    Args:
      results: Results of the study.
      task: Name of the task.
    """
    if not any(results.interval(cell, REWARD) for cell in results.cells(task)):
        return None
    compared = len(results.methods) > 1
    width = max(_PANEL[0], 0.9 + 0.26 * len(results.methods) * len(results.learning_rates))
    with figures.panels(2 * (1 + compared), 2, (width, _PANEL[1])) as (figure, panels):
        for column, metric in enumerate(figures.COMPARED):
            _dodged(panels[column], results, task, metric, results.interval)
            panels[column].set_title(describe(metric).title)
            if compared:
                below = panels[column + 2]
                _dodged(below, results, task, metric, results.difference)
                below.axhline(0.0, color="#888888", linewidth=1)
                below.set_title(f"Difference from {results.baseline}")
            panels[column - 2].set_xlabel("learning rate")
        add_legend(figure, results)
    return figure


def plot_comparison(results: StudyResults, task: str, by_generations: bool = False) -> Figure | None:
    """Draws held-out reward and correct clusters over training steps, with a row of panels per learning rate.

    Lines are means over finished runs. Shaded bands extend from the lowest to the highest run. Returns None if no
    finished run was evaluated.

    Args:
      results: Results of the study.
      task: Name of the task.
      by_generations: Whether the horizontal axis is the number of responses that were generated for training, as mean
        over seeds, instead of the training step. Returns None if it is the same for all runs.
    """
    runs = [one for one in results.results if one.key.task == task and one.state.is_finished]
    if by_generations and len({max(one.generations_drawn.items()) for one in runs}) < 2:
        return None
    metrics = [name for name in (REWARD, CORRECT_OF_8, CORRECT_OF_64) if name in results.metrics(task)]
    learning_rates = [
        rate for rate in results.learning_rates if any(results.of((task, method, rate)) for method in results.methods)
    ]
    if not metrics or not learning_rates:
        return None
    shared = {"sharex": True, "sharey": "col"}
    with figures.panels(len(learning_rates) * len(metrics), len(metrics), _PANEL, **shared) as (figure, panels):
        for axes, (rate, metric) in zip(panels, itertools.product(learning_rates, metrics), strict=True):
            for method, style in line_styles(results).items():
                cell = results.of((task, method, rate))
                curves = [figures.series(run.rows, metric) for run in cell]
                draw_band(axes, curves, style, True, [run.generations_drawn for run in cell] if by_generations else ())
            axes.set_title(describe(metric).title)
            if metric == metrics[0] and len(learning_rates) > 1:
                axes.set_ylabel(f"learning rate {rate:g}")
            if describe(metric).unit_axis:
                figures.unit_axis(axes, "y")
        figures.step_axes(panels, "generations drawn" if by_generations else "training step")
        for axes in panels[: -len(metrics)]:
            axes.set_xlabel("")
        add_legend(figure, results)
    return figure


def plot_curves(results: StudyResults, task: str, metric: str) -> Figure | None:
    """Draws a metric over training steps, with a panel per learning rate. Returns None if there is no data.

    Lines are means over finished runs. Shaded bands extend from the lowest to the highest run. Each unfinished run is
    drawn as a separate thin dotted line.

    Args:
      results: Results of the study.
      task: Name of the task.
      metric: Name of the metric in metrics.jsonl.
    """

    def draw(axes: Axes, runs: Sequence[Result], style: Mapping[str, Any]) -> None:
        draw_band(axes, [figures.series(run.rows, metric) for run in runs], style, marked=is_held_out(metric))
        if describe(metric).unit_axis:
            figures.unit_axis(axes, "y")

    def draw_unfinished(axes: Axes, run: Result, style: Mapping[str, Any]) -> None:
        axes.plot(*figures.series(run.rows, metric), color=style["color"], linewidth=0.9, linestyle=(0, (1, 2)))

    return panels(results, task, draw, "training step", draw_unfinished)


def plot_branching(results: StudyResults, task: str, benchmark: str) -> Figure | None:
    """Draws the mean number of active branches by token position, with a panel per learning rate.

    Lines are means over seeds, and bands are ranges. Returns None if there is no data.

    Args:
      results: Results of the study.
      task: Name of the task.
      benchmark: Label of the benchmark of a separate evaluation.
    """

    def draw(axes: Axes, runs: Sequence[Result], style: Mapping[str, Any]) -> None:
        found = [run.evaluations[benchmark]["branching"]["mean"] for run in runs if benchmark in run.evaluations]
        length = max(map(len, found), default=0)
        seeds = [(np.arange(length) + 1, np.pad(np.array(means, float), (0, length - len(means)))) for means in found]
        draw_band(axes, seeds, style, marked=False, smooth=False)

    return panels(results, task, draw, "token position")


def _dodged(
    axes: Axes,
    results: StudyResults,
    task: str,
    metric: str,
    interval_of: Callable[[tuple[str, str, float], str], Interval | None],
) -> None:
    """Draws an interval for each method and learning rate, with the methods side by side."""
    step = 0.7 / len(results.methods)
    for method_index, (method, style) in enumerate(line_styles(results).items()):
        for index, rate in enumerate(results.learning_rates):
            interval = interval_of((task, method, rate), metric)
            if interval is not None:
                x = index + (method_index - (len(results.methods) - 1) / 2) * step
                if math.isfinite(interval.low):
                    axes.plot([x, x], [interval.low, interval.high], color=style["color"], linewidth=1.6)
                axes.plot(x, interval.mean, style["marker"], color=style["color"], markersize=6, fillstyle="none")
    axes.set_xticks(range(len(results.learning_rates)), [f"{rate:g}" for rate in results.learning_rates])
    axes.set_xlim(-0.5, len(results.learning_rates) - 0.5)
    axes.grid(axis="x", visible=False)


def panels(
    results: StudyResults,
    task: str,
    draw: Callable[[Axes, Sequence[Result], Mapping[str, Any]], None],
    x_label: str,
    draw_unfinished: Callable[[Axes, Result, Mapping[str, Any]], None] | None = None,
    references: Sequence[Line2D] = (),
) -> Figure | None:
    """Creates a figure with a panel per learning rate and a shared y-axis. Returns None if nothing is drawn.

    Args:
      results: Results of the study.
      task: Name of the task.
      draw: Draws the finished runs of a method in a panel, with the line style of the method.
      x_label: Label of the horizontal axes.
      draw_unfinished: Draws an unfinished run. If None, unfinished runs are not drawn.
      references: Lines that are drawn in all panels.
    """
    rates = results.learning_rates
    size = _PANEL[0] * (2 if len(rates) == 1 else 1), _PANEL[1]
    with figures.panels(len(rates), len(rates), size, sharey=True) as (figure, drawn):
        for axes, rate in zip(drawn, rates, strict=True):
            for line in references:
                axes.plot(*line.get_data(), color=line.get_color(), linestyle=line.get_linestyle())
            for method, style in line_styles(results).items():
                draw(axes, results.of((task, method, rate)), style)
                if draw_unfinished is not None:
                    for run in results.of((task, method, rate), finished=False):
                        draw_unfinished(axes, run, style)
            axes.set_title(f"learning rate {rate:g}" if len(rates) > 1 else "")
            axes.set_xlabel(x_label)
        if drawn[0].get_xscale() == "linear":
            figures.step_axes(drawn, x_label)
        if not any(len(np.atleast_1d(line.get_xdata())) for axes in drawn for line in axes.lines):
            return None
        add_legend(figure, results, *references)
    return figure


def draw_band(
    axes: Axes,
    seeds: Sequence[Curve],
    style: Mapping[str, Any],
    marked: bool,
    places: Sequence[Mapping[int, int]] = (),
    smooth: bool = True,
) -> None:
    """Draws the mean and range over seeds, at the positions that all seeds have.

    Args:
      axes: Panel to draw in.
      seeds: Positions and values of each seed.
      style: Line style of the method.
      marked: Whether to draw markers.
      places: Places of the positions on the horizontal axis, for each seed. The band is drawn at their mean. If empty,
        it is drawn at the positions.
      smooth: Whether to smooth values without markers.
    """
    seeds = [seed for seed in seeds if len(seed[0])]
    if not seeds:
        return
    steps = seeds[0][0]
    for other, _ in seeds[1:]:
        steps = np.intersect1d(steps, other)
    curves = [values[np.isin(at, steps)] for at, values in seeds]
    table = np.stack(curves if marked or not smooth else [figures.smooth(values) for values in curves])
    if places:
        steps = np.array([np.mean([of_seed[step] for of_seed in places]) for step in steps.tolist()])
    axes.plot(steps, table.mean(axis=0), **(hollow_line(style) if marked else {**style, "marker": ""}))
    axes.fill_between(steps, table.min(axis=0), table.max(axis=0), color=style["color"], alpha=0.15, linewidth=0)


def hollow_line(style: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the line style of a method with hollow markers, which remain visible when they overlap."""
    return {**style, "markersize": 4.5, "fillstyle": "none"}


def add_legend(figure: Figure, results: StudyResults, *others: Line2D) -> None:
    """Adds a legend above all panels.

    Args:
      figure: The figure. Its height is increased by the height of the legend.
      results: Results of the study, with the methods of the legend.
      *others: Further legend handles.
    """
    handles = [
        *(Line2D([], [], fillstyle="none", markersize=7, **style) for style in line_styles(results).values()),
        *others,
    ]
    columns = max(1, int(figure.get_figwidth() / 1.8))
    rows = -(-len(handles) // columns)
    figure.set_figheight(figure.get_figheight() + 0.15 + 0.25 * rows)  # keeps the size of the panels
    figure.legend(handles=handles, loc="outside upper left", ncols=columns)
