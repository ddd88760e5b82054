"""Draws the frontier: held-out reward against correct clusters, with a point per method and learning rate."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from poly_epo_jax.metrics.intervals import Interval
from poly_epo_jax.metrics.logged import describe
from poly_epo_jax.report import figures
from poly_epo_jax.study.figures import add_legend, line_styles
from poly_epo_jax.study.results import CORRECT_OF_8, REWARD, StudyResults

# Two points are neighbors if their distance is at most this fraction of the range of the points, on both axes.
_NEAR = 0.12


class Point(NamedTuple):
    """A method at a learning rate.

    Attributes:
      x: Mean and interval of correct clusters.
      y: Mean and interval of the reward.
      method: Name of the method.
      text: Learning rate next to the marker. Empty if the study has only one learning rate.
      size: Size of the marker in typographic points.
    """

    x: Interval
    y: Interval
    method: str
    text: str
    size: float


def plot_frontier(results: StudyResults, task: str) -> Figure | None:
    """Draws all points with intervals over seeds on both axes, and a second panel that enlarges the densest region.

    The second panel is omitted if fewer than three points are close to each other, or if all points are. Markers are
    hollow and differ in size (larger for higher learning rates), so that overlapping points remain visible. Learning
    rates are written without overlap. Arrows point to the next higher learning rate. Crosses mark the last evaluations
    of unfinished runs. Returns None if there is no data.

    Args:
      results: Results of the study.
      task: Name of the task.
    """
    points = _points(results, task)
    unfinished = [run for cell in results.cells(task) for run in results.of(cell, finished=False)]
    ended = [run for run in unfinished if run.at_end(CORRECT_OF_8) is not None]
    if not points and not ended:
        return None
    crowd = _crowd(points)
    with figures.panels(1 + bool(crowd), 2, (6.25 if crowd else 8.0, 5.0)) as (figure, panels):
        for axes in panels:
            _draw_points(axes, results, points)
            axes.set_xlabel(describe(CORRECT_OF_8).title)
        panels[0].set_ylabel(describe(REWARD).title)
        for run in ended:
            position: tuple[Any, Any] = run.at_end(CORRECT_OF_8), run.at_end(REWARD)
            panels[0].plot(*position, "x", color=line_styles(results)[run.key.method]["color"], markersize=5, alpha=0.8)
        panels[0].margins(0.12)
        cross = Line2D([], [], color="#555555", marker="x", linestyle="", label="unfinished run (last evaluation)")
        add_legend(figure, results, *[cross][: len(ended)])
        if crowd:
            _enlarge(panels[1], crowd)
        figure.draw_without_rendering()  # applies the layout, which determines positions in points
        _label_points(panels[0], results, [point for point in points if point not in crowd])
        if crowd:
            _label_points(panels[1], results, crowd)
    return figure


def _points(results: StudyResults, task: str) -> list[Point]:
    """Returns the points by method, each in ascending order of learning rate."""
    found, num_methods = [], len(results.methods)
    for method_index, method in enumerate(results.methods):
        for index, rate in enumerate(results.learning_rates):
            cell = (task, method, rate)
            x, y = results.interval(cell, CORRECT_OF_8), results.interval(cell, REWARD)
            if x is not None and y is not None:
                size = 5 + 11 * ((index + 1) * num_methods - method_index) / (num_methods * len(results.learning_rates))
                found.append(Point(x, y, method, f"{rate:g}" if len(results.learning_rates) > 1 else "", size))
    return found


def _crowd(points: Sequence[Point]) -> list[Point]:
    """Returns the largest group of points that are neighbors of one point, including this point.

    The result is empty if the group has fewer than three points, or contains all points.
    """
    if not points:
        return []
    positions = np.array([(point.x.mean, point.y.mean) for point in points])
    extent = np.maximum(np.ptp(positions, axis=0), np.finfo(float).tiny)
    near = (np.abs(positions[:, None] - positions) <= _NEAR * extent).all(axis=2)
    chosen = near[int(near.sum(axis=1).argmax())]
    return (
        [point for point, is_near in zip(points, chosen, strict=True) if is_near]
        if 3 <= chosen.sum() < len(points)
        else []
    )


def _enlarge(axes: Axes, crowd: Sequence[Point]) -> None:
    """Limits the axes to the means of these points plus a margin. Intervals can extend beyond the axes."""
    for values, set_limits in (([p.x.mean for p in crowd], axes.set_xlim), ([p.y.mean for p in crowd], axes.set_ylim)):
        low, high = min(values), max(values)
        margin = 0.35 * (high - low) or 0.01 * abs(high) or 0.01
        set_limits(low - margin, high + margin)
    axes.set_title("densest region, enlarged")


def _draw_points(axes: Axes, results: StudyResults, points: Sequence[Point]) -> None:
    for method, style in line_styles(results).items():
        own = [point for point in points if point.method == method]
        for x, y, _, _, size in own:
            thin = {"color": style["color"], "linewidth": 1.2, "alpha": 0.6, "zorder": 2}
            if math.isfinite(x.low):
                axes.plot([x.low, x.high], [y.mean, y.mean], **thin)
            if math.isfinite(y.low):
                axes.plot([x.mean, x.mean], [y.low, y.high], **thin)
            axes.plot(
                x.mean, y.mean, style["marker"], color=style["color"], markersize=size, fillstyle="none", zorder=3
            )
        for start, end in itertools.pairwise(own):
            arrow = {"arrowstyle": "->", "color": style["color"], "alpha": 0.45, "shrinkA": 8, "shrinkB": 8}
            ends = (end.x.mean, end.y.mean), (start.x.mean, start.y.mean)
            # annotation_clip=False draws arrows that leave the axes. The clip path cuts them at the axes.
            drawn = axes.annotate("", *ends, arrowprops=arrow | {"clip_path": axes.patch}, annotation_clip=False)
            assert drawn.arrow_patch is not None
            drawn.arrow_patch.set_clip_on(True)


def _label_points(axes: Axes, results: StudyResults, points: Sequence[Point]) -> None:
    """Writes each learning rate at a free position near its point, connected to the point by a thin line.

    A learning rate without a free position is omitted.
    """
    color_of, to_points = {method: style["color"] for method, style in line_styles(results).items()}, 72 / figures.DPI
    centers = [axes.transData.transform((point.x.mean, point.y.mean)) * to_points for point in points]
    taken = [(center, np.array([6.0, 6.0])) for center in centers]
    turns = [np.array([math.cos(turn), math.sin(turn)]) for turn in np.arange(16) * math.pi / 8]
    offsets = [radius * turn for radius in range(16, 120, 6) for turn in turns]
    for point, center in zip(points, centers, strict=True):
        size = np.array([2.4 * len(point.text) + 2, 5.0])  # half of the width and height of a text of 7.5 points
        offset = next(
            (o for o in offsets if all(np.any(np.abs(center + o - at) >= size + room) for at, room in taken)), None
        )
        if offset is None or not point.text:
            continue
        taken.append((center + offset, size))
        color = color_of[point.method]
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0, "shrinkB": 3}
        position = (point.x.mean, point.y.mean)
        text = axes.annotate(
            point.text, position, tuple(offset), textcoords="offset points", arrowprops=line, fontsize=7.5
        )
        text.set(color=color, ha="center", va="center")
