"""Draws pass@k of the runs of a study and of reference models. Does not require JAX.

A reference is a model that is evaluated in the evaluation folder of the study but is not one of its runs, such as the
policy before training with the label `base`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from poly_epo_jax.metrics.evaluation import PASS
from poly_epo_jax.metrics.intervals import Interval
from poly_epo_jax.report import figures
from poly_epo_jax.report.evaluation_figures import K_LABEL, curve, draw_pass_at_k, last_evaluation, log2_axis
from poly_epo_jax.study.figures import hollow_line, panels
from poly_epo_jax.study.results import Result, StudyResults

_REFERENCE_DASHES: tuple[Any, ...] = ("--", ":", "-.")
Curve = Mapping[int, float]
"""pass@k by k."""


def plot_pass_at_k(results: StudyResults, task: str, benchmark: str = "") -> Figure | None:
    """Draws pass@k with a panel per learning rate. Returns None if there is no data.

    Lines are means over finished seeds, and bands are ranges over seeds. Black lines are references.

    Args:
      results: Results of the study.
      task: Name of the task.
      benchmark: Label of the benchmark. If empty, pass@k of the last evaluation during training is drawn.
    """
    references = []
    for index, (label, evaluation) in enumerate(results.references(task, benchmark).items()):
        found, dashes = curve_of(evaluation), _REFERENCE_DASHES[index % len(_REFERENCE_DASHES)]
        references.append(Line2D(list(found), list(found.values()), label=label, color="#000000", linestyle=dashes))

    def draw(axes: Axes, runs: Sequence[Result], style: Mapping[str, Any]) -> None:
        if curves := curves_of(runs, benchmark):
            shared = [k for k in curves[0] if all(k in one for one in curves)]
            values = {k: [one[k] for one in curves] for k in shared}
            points = {k: Interval(float(np.mean(at_k)), min(at_k), max(at_k)) for k, at_k in values.items()}
            draw_pass_at_k(axes, points, hollow_line(style))
        log2_axis(axes, K_LABEL)
        figures.unit_axis(axes, "y")

    return panels(results, task, draw, K_LABEL, references=references)


def curves_of(runs: Sequence[Result], benchmark: str) -> list[Curve]:
    """Returns the curve of each run that has it: of a benchmark or, if it is empty, of the last held-out evaluation."""
    found = [
        run.evaluations.get(benchmark, {"metrics": {}}) if benchmark else last_evaluation(run.rows) for run in runs
    ]
    return [points for points in map(curve_of, found) if points]


def curve_of(evaluation: Mapping[str, Any]) -> Curve:
    """Returns pass@k of the content of results.json."""
    return {k: point.mean for k, point in curve(evaluation, PASS).items()}
