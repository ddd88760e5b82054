"""Draws docs/images/example.png: eight responses, scores of sets of four, and the advantages of two methods.

python docs/images/draw_example.py
"""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

from poly_epo_jax import set_rl
from poly_epo_jax.cli.explain import group_advantages, in_rms_units

STRATEGIES, REWARDS = "AAAAABAC", (1, 1, 1, 1, 1, 1, 0, 0)
KINDS = [letter + "-+"[reward] for letter, reward in zip(STRATEGIES, REWARDS, strict=True)]
SETS = (["A+", "A+", "A+", "A+"], ["A+", "A+", "A+", "B+"], ["A+", "A+", "A+", "A-"], ["A+", "A+", "A+", "C-"])
COLORS = {"Poly-EPO": "#0072B2", "GRPO": "#D55E00"}
GREEN, GRAY, FAINT = "#009E73", "#999999", "#666666"
WIDTH, HEIGHT, TOP, ROW = 9.6, 3.2, 1.1, 0.46  # inches
BAR = 0.24  # inches per unit


def draw_response(axes: Axes, x: float, y: float, kind: str) -> None:
    """Draws a disk with the letter of the strategy, and a check mark (correct) or a cross (incorrect) next to it."""
    is_correct = kind[1] == "+"
    axes.add_patch(Circle((x, y), 0.14, color=GREEN if is_correct else GRAY))
    axes.text(x, y + 0.005, kind[0], color="white", weight="bold", ha="center")
    axes.text(x + 0.15, y, "\u2713" if is_correct else "\u2717", fontsize=9)


def draw_sets(axes: Axes, left: float, right: float) -> None:
    """Draws the four sets of `SETS` with their scores, and the mean score of all sets."""
    for row, members in enumerate(SETS):
        for place, kind in enumerate(members):
            draw_response(axes, left + 0.15 + 0.45 * place, TOP + ROW * row, kind)
        reward, distinct = np.mean([kind[1] == "+" for kind in members]), len({kind[0] for kind in members})
        factors, score = f"{reward:.3g} \u00d7 {distinct}/4", f"{reward * distinct / 4:.2f}"
        axes.text(right, TOP + ROW * row, f"{factors} = {score}".replace("0.", "."), ha="right")
    sets = set_rl.enumerate_sets(num_generations=8, set_size=4)
    clusters = np.array([ord(letter) for letter in STRATEGIES])
    mean = np.mean(set_rl.polychromic(np.array(REWARDS)[sets], clusters[sets]))
    axes.text(
        right, TOP + 3.9 * ROW, f"mean of all {len(sets)} sets: {mean:.3f}".replace("0.", "."), color=FAINT, ha="right"
    )


def draw_advantages(axes: Axes, left: float) -> None:
    """Draws the advantages of both methods, in units of the root mean square advantage of the method."""
    advantages = group_advantages(REWARDS, list(STRATEGIES), set_size=4)
    order = sorted(set(KINDS), key=lambda kind: -advantages["Poly-EPO"][KINDS.index(kind)])
    for row, kind in enumerate(order):
        draw_response(axes, left + 0.15, TOP + ROW * row, kind)
        if (count := KINDS.count(kind)) > 1:
            axes.text(left + 0.5, TOP + ROW * row, f"\u00d7{count}", color=FAINT)
    for column, (method, color) in enumerate(COLORS.items()):
        zero = left + 1.4 + 1.55 * column
        axes.text(zero, 0.64, method, color=color, weight="bold", fontsize=12, ha="center")
        axes.plot([zero, zero], [TOP - 0.22, TOP + 3 * ROW + 0.22], color="#bbbbbb", linewidth=0.8, zorder=0)
        for row, kind in enumerate(order):
            value = in_rms_units(advantages[method])[KINDS.index(kind)]
            axes.add_patch(Rectangle((zero, TOP + ROW * row - 0.1), value * BAR, 0.2, color=color))
            x, side = (value * BAR + 0.05, "left") if value > 0 else (value * BAR - 0.05, "right")
            axes.text(zero + x, TOP + ROW * row, f"{value:+.1f}".replace("-", "\u2212"), ha=side)
    axes.text(WIDTH - 0.15, TOP + 3.9 * ROW, "in units of the method's root mean square", color=FAINT, ha="right")


def draw() -> Figure:
    """Returns the figure. Scores and advantages are computed, not copied."""
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=200, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.axis("off")
    titles = {0.2: "1  Eight responses", 2.25: "2  Score of each set of four", 6.0: "3  Advantage of each response"}
    for x, title in titles.items():
        axes.text(x, 0.3, title, weight="bold", fontsize=12)
    axes.text(0.2, 0.64, "letter = strategy", color=FAINT)
    for place, kind in enumerate(KINDS):
        draw_response(axes, 0.4 + 0.6 * (place % 2), TOP + ROW * (place // 2), kind)
    axes.text(2.25, 0.64, "mean reward \u00d7 distinct strategies / 4", color=FAINT)
    draw_sets(axes, left=2.25, right=5.5)
    draw_advantages(axes, left=6.0)
    for text in axes.texts:
        text.set_verticalalignment("center")
    return figure


if __name__ == "__main__":
    with matplotlib.rc_context({"font.size": 10.5}):
        draw().savefig(Path(__file__).with_name("example.png"))
