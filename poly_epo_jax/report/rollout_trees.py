"""Draws the prefix trees of the generations of a problem (paper §6.1)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from poly_epo_jax.metrics.branching import prefix_tree
from poly_epo_jax.report import figures
from poly_epo_jax.report.evaluation_figures import LineStyles

CORRECT: dict[str, Any] = {"color": "#009E73", "marker": "o"}
INCORRECT: dict[str, Any] = {"color": "#D55E00", "marker": "X"}
_EDGE = "#8a8a8a"

Rollouts = Sequence[tuple[Int[np.ndarray, " _"], bool]]
"""Token ids and correctness of each generation of a problem."""


def plot_rollout_trees(title: str, rollouts: Mapping[str, Rollouts], line_styles: LineStyles) -> Figure | None:
    """Draws rollout trees of a problem side by side. Returns None without generations.

    Color and marker of a leaf show whether the generation is correct.

    Args:
      title: Title of the figure.
      rollouts: Generations of the problem, by model.
      line_styles: Line style of each model.
    """
    if not rollouts:
        return None
    longest = max(len(ids) for generations in rollouts.values() for ids, _ in generations)
    with figures.panels(len(rollouts), len(rollouts), (3.4, 3.2)) as (figure, panels):
        for axes, (model, generations) in zip(panels, rollouts.items(), strict=True):
            draw_tree(axes, generations)
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
            Line2D([], [], **CORRECT, linestyle="", label="correct"),
            Line2D([], [], **INCORRECT, linestyle="", label="incorrect"),
        ]
        figure.legend(handles=marks, loc="outside upper left", ncols=2, title=title, alignment="left")
    return figure


def draw_tree(axes: Axes, rollouts: Rollouts) -> None:
    """Draws the prefix tree of generations, with one row per generation, over token positions.

    Generations are sorted lexicographically by their tokens, so that generations with a shared prefix are adjacent. An
    edge is centered on its generations, and its width increases with their number.
    """
    token_ids = [ids for ids, _ in rollouts]
    order = sorted(range(len(rollouts)), key=lambda generation: token_ids[generation].tolist())
    rows = {generation: row for row, generation in enumerate(order)}
    root = (len(rollouts) - 1) / 2
    centers: list[float] = []
    ends = dict.fromkeys(rows, root)
    for segment in prefix_tree(token_ids):
        row = sum(rows[generation] for generation in segment.generations) / len(segment.generations)
        parent_row = root if segment.parent is None else centers[segment.parent]
        centers.append(row)
        ends |= dict.fromkeys(segment.generations, row)  # parents precede children: the deepest edge remains
        width = 0.9 + 0.5 * math.log2(len(segment.generations))
        positions, heights = [segment.start, segment.start, segment.end], [parent_row, row, row]
        axes.plot(positions, heights, color=_EDGE, linewidth=width, solid_joinstyle="round")
    for generation, row in rows.items():
        ids, is_correct = rollouts[generation]
        axes.plot([len(ids)] * 2, [ends[generation], row], color=_EDGE, linewidth=0.9)
        mark = CORRECT if is_correct else INCORRECT
        axes.plot(len(ids), row, **mark, markersize=6, markeredgecolor="white", markeredgewidth=0.6, zorder=3)
