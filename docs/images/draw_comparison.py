"""Draws docs/images/comparison.png from the runs of two configurations, `polynomial` and `polynomial:grpo`.

python docs/images/draw_comparison.py
"""

from pathlib import Path

from matplotlib.axes import Axes

from poly_epo_jax.metrics.logged import HELD_OUT_CORRECT_CLUSTERS, HELD_OUT_REWARD
from poly_epo_jax.records.run_folder import METRICS, read_rows
from poly_epo_jax.report.figures import MARKED, panels, series

RUNS = {"Poly-EPO": "runs/polynomial-poly_epo", "GRPO": "runs/polynomial-grpo"}
COLORS = {"Poly-EPO": "#0072B2", "GRPO": "#D55E00"}
TITLES = {
    HELD_OUT_REWARD: "Fraction of correct answers",
    HELD_OUT_CORRECT_CLUSTERS: "Different correct answers among eight",
}


def draw_panel(axes: Axes, metric: str, top: float, name_offsets: dict[str, float]) -> None:
    """Draws a held-out metric of both runs over training steps, and writes the names of the methods at the lines.

    Args:
      axes: The panel.
      metric: Name of the metric.
      top: Upper limit of the vertical axis, which starts at 0.
      name_offsets: Vertical distance of each name from the end of its line, as a fraction of `top`.
    """
    for method, folder in RUNS.items():
        steps, values = series(read_rows(Path(folder) / METRICS), metric)
        axes.plot(steps, values, color=COLORS[method], **MARKED)
        place = (steps[-1] + 4, values[-1] + top * name_offsets[method])
        axes.text(*place, method, color=COLORS[method], weight="bold", va="center")
    axes.set(title=TITLES[metric], xlabel="training step", xlim=(-4, 190), ylim=(0, top), xticks=range(0, 151, 50))


if __name__ == "__main__":
    with panels(2, 2, (4.3, 2.8)) as (figure, (left, right)):
        draw_panel(left, HELD_OUT_REWARD, 1.1, {"Poly-EPO": -0.05, "GRPO": 0.03})
        draw_panel(right, HELD_OUT_CORRECT_CLUSTERS, 8, {"Poly-EPO": 0.0, "GRPO": 0.0})
        figure.savefig(Path(__file__).with_name("comparison.png"), facecolor="white")
