"""Draws the figures of evaluations from the content of results.json (paper §6.1).

`Evaluations` maps benchmark and model label to results. `line_styles` is the result of `figures.styles` for all labels
of the report, so that a model has the same color in all figures.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from poly_epo_jax.metrics.branching import prefix_tree
from poly_epo_jax.metrics.evaluation import MAJORITY_ACCURACY, MAJORITY_VOTE_SHARE, PASS, split
from poly_epo_jax.metrics.logged import held_out
from poly_epo_jax.report import figures

Results = Mapping[str, Any]
Evaluations = Mapping[str, Mapping[str, Results]]
LineStyles = Mapping[str, Mapping[str, Any]]

CORRECT_COLOR, INCORRECT_COLOR = "#009E73", "#D55E00"
_EDGE = "#8a8a8a"
_PANEL = (3.4, 2.8)


class MetricEstimate(NamedTuple):
    """The value of a metric at k.

    Attributes:
      k: Number of generations.
      mean: Mean over problems.
      low: Lower bound of the 95% interval. None if there is no interval.
      high: Upper bound of the 95% interval. None if there is no interval.
    """

    k: int
    mean: float
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True)
class Edge:
    """A segment of tokens that a group of generations shares.

    Attributes:
      start: First token position.
      end: Token position after the last token.
      row: Vertical position of the edge.
      parent_row: Vertical position of the parent edge, or of the root.
      size: Number of generations that share the segment.
    """

    start: int
    end: int
    row: float
    parent_row: float
    size: int


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The end of a generation.

    Attributes:
      generation: Index of the generation.
      length: Number of tokens of the generation.
      row: Vertical position of the leaf.
      edge_row: Vertical position of its edge.
    """

    generation: int
    length: int
    row: int
    edge_row: float


@dataclasses.dataclass(frozen=True)
class Tree:
    """The layout of the prefix tree of a problem's generations.

    Attributes:
      edges: Edges, parents before children.
      leaves: Leaves, from top to bottom.
      correct: Whether each generation is correct, by its index.
    """

    edges: list[Edge]
    leaves: list[Leaf]
    correct: list[bool]


def model_labels(evaluations: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the labels of all models, in order of first occurrence."""
    return list(dict.fromkeys(model for models in evaluations.values() for model in models))


def curve(results: Results, metric: str) -> list[MetricEstimate]:
    """Returns the values of a metric at each k, in ascending order of k.

    Args:
      results: Content of results.json.
      metric: Name of the metric, without k.
    """
    found = []
    for name, value in results["metrics"].items():
        stem, k = split(name)
        if stem == metric and k is not None:
            found.append(MetricEstimate(k, float(value["mean"]), finite(value.get("low")), finite(value.get("high"))))
    return sorted(found)


def last_evaluation(rows: figures.Rows) -> Results:
    """Returns pass@k of the last row of a run that has it, in the form of results.json."""
    prefix = held_out(f"{PASS}@")
    for row in reversed(rows):
        if found := {name: value for name, value in row.items() if name.startswith(prefix) and value is not None}:
            return {"metrics": {name.removeprefix(held_out("")): {"mean": value} for name, value in found.items()}}
    return {"metrics": {}}


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
        log2_axis(axes, "k (attempts)")
        axes.set_ylabel("pass@k")
        figures.unit_axis(axes, "y")

    return _benchmark_panels(evaluations, line_styles, draw_pass_at_k, finish, panel_size)


def draw_pass_at_k(axes: Axes, results: Results, style: Mapping[str, Any]) -> None:
    """Draws pass@k, or a difference in pass@k, of a model. Powers of two and the largest k have markers.

    Args:
      axes: Panel to draw in.
      results: Content of results.json, of which "metrics" is read.
      style: Line style of the model.
    """
    points = curve(results, PASS)
    ks, means = [point.k for point in points], [point.mean for point in points]
    marked = [index for index, k in enumerate(ks) if k.bit_count() == 1 or index == len(ks) - 1]
    axes.plot(ks, means, **figures.MARKED, **style, markevery=marked)
    bounded = [point for point in points if point.low is not None and point.high is not None]
    ks, low, high = np.array([(point.k, point.low, point.high) for point in bounded], float).reshape(-1, 3).T
    axes.fill_between(ks, low, high, color=style["color"], alpha=0.15, linewidth=0)


def plot_held_out_pass_at_k(runs: figures.Runs) -> Figure | None:
    """Draws pass@k of the last evaluation during the training of each run. Returns None if no run has it."""
    last = {label: last_evaluation(rows) for label, rows in runs.items()}
    if not any(results["metrics"] for results in last.values()):
        return None
    title = "Held-out pass@k at the last evaluation"
    return plot_pass_at_k({title: last}, figures.styles(list(runs)), (6.5, 3.8))


def plot_majority(evaluations: Evaluations, line_styles: LineStyles) -> Figure | None:
    """Draws the accuracy of the majority answer of k generations over its vote share. Returns None without results.

    Lines begin at k = 1, where the vote share is 1 if all generations have an answer.

    Args:
      evaluations: Results by benchmark and model.
      line_styles: Line style of each model.
    """

    def draw(axes: Axes, results: Results, style: Mapping[str, Any]) -> None:
        shares, accuracies = curve(results, MAJORITY_VOTE_SHARE), curve(results, MAJORITY_ACCURACY)
        axes.plot([p.mean for p in shares], [p.mean for p in accuracies], **figures.MARKED, **style)
        if shares and not axes.texts:  # one label per panel: all lines end at the same k
            text, position = f"k = {shares[-1].k}", (shares[-1].mean, accuracies[-1].mean)
            note = axes.annotate(text, position, (0, 6), textcoords="offset points", ha="center", fontsize=8)
            note.set(color=style["color"], path_effects=[withStroke(linewidth=2.5, foreground="white")])

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


def plot_rollout_trees(title: str, trees: Mapping[str, Tree], line_styles: LineStyles) -> Figure | None:
    """Draws rollout trees of a problem side by side. Returns None without trees.

    Color and marker of a leaf show whether the generation is correct.

    Args:
      title: Title of the figure.
      trees: Trees by model.
      line_styles: Line style of each model.
    """
    if not trees:
        return None
    longest = max((leaf.length for tree in trees.values() for leaf in tree.leaves), default=1)
    with figures.panels(len(trees), len(trees), (_PANEL[0], 3.2)) as (figure, panels):
        for axes, (model, tree) in zip(panels, trees.items(), strict=True):
            _draw_tree(axes, tree)
            axes.set_title(model, color=line_styles[model]["color"])
            axes.set_xscale("function", functions=(np.log1p, np.expm1))
            axes.set_xlim(0, longest * 1.3)
            ticks = [0] + [4**power for power in range(int(math.log(max(longest, 1), 4)) + 1)]
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.set_xlabel("token position")
            axes.set_yticks([])
            axes.spines["left"].set_visible(False)
            axes.grid(False)
        marks = [
            Line2D([], [], color=CORRECT_COLOR, marker="o", linestyle="", label="correct"),
            Line2D([], [], color=INCORRECT_COLOR, marker="X", linestyle="", label="incorrect"),
        ]
        figure.legend(handles=marks, loc="outside upper left", ncols=2, title=title, alignment="left")
    return figure


def lay_out_tree(token_ids: Sequence[Int[np.ndarray, " _"]], correct: Sequence[bool]) -> Tree:
    """Computes the layout of a prefix tree, with one row per generation.

    Generations are sorted lexicographically by their tokens, so that generations with a shared prefix are adjacent. An
    edge is centered on its generations.

    Args:
      token_ids: Token ids [T_i] of each generation.
      correct: Whether each generation is correct.
    """
    order = sorted(range(len(token_ids)), key=lambda generation: token_ids[generation].tolist())
    rows = {generation: row for row, generation in enumerate(order)}
    root = (len(token_ids) - 1) / 2
    edges: list[Edge] = []
    ends = dict.fromkeys(rows, root)
    for segment in prefix_tree(token_ids):
        row = sum(rows[generation] for generation in segment.generations) / len(segment.generations)
        parent_row = root if segment.parent is None else edges[segment.parent].row
        edges.append(Edge(segment.start, segment.end, row, parent_row, len(segment.generations)))
        ends |= dict.fromkeys(segment.generations, row)  # parents precede children: the deepest edge remains
    leaves = [Leaf(generation, len(token_ids[generation]), rows[generation], ends[generation]) for generation in order]
    return Tree(edges, leaves, list(correct))


def _draw_tree(axes: Axes, tree: Tree) -> None:
    for edge in tree.edges:
        width = 0.9 + 0.5 * math.log2(edge.size)
        path = [(edge.start, edge.parent_row), (edge.start, edge.row), (edge.end, edge.row)]
        axes.plot(*np.array(path, float).T, color=_EDGE, linewidth=width, solid_joinstyle="round")
    for leaf in tree.leaves:
        axes.plot([leaf.length] * 2, [leaf.edge_row, leaf.row], color=_EDGE, linewidth=0.9)
        color, marker = (CORRECT_COLOR, "o") if tree.correct[leaf.generation] else (INCORRECT_COLOR, "X")
        style: dict[str, Any] = {"color": color, "marker": marker}
        axes.plot(leaf.length, leaf.row, markersize=6, markeredgecolor="white", markeredgewidth=0.6, zorder=3, **style)


def _benchmark_panels(
    evaluations: Evaluations,
    line_styles: LineStyles,
    draw: Callable[[Axes, Results, Mapping[str, Any]], None],
    finish: Callable[[Axes], None],
    panel_size: tuple[float, float] = _PANEL,
) -> Figure | None:
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


def finite(value: int | float | None) -> float | None:
    """Returns the value, or None if it is missing or not finite."""
    return float(value) if value is not None and math.isfinite(value) else None
