"""Compares pass@k of models on the same problems: the difference for each problem, and its interval over problems."""

import numpy as np
from matplotlib.figure import Figure

from poly_epo_jax.metrics.evaluation import PASS, at
from poly_epo_jax.metrics.intervals import bootstrap_interval
from poly_epo_jax.metrics.pass_at_k import pass_at_k
from poly_epo_jax.report import figures
from poly_epo_jax.report.evaluation_figures import (
    Evaluations,
    LineStyles,
    Results,
    draw_pass_at_k,
    log2_axis,
    model_labels,
    plot_pass_at_k,
)


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
                    draw_pass_at_k(axes, results, line_styles[model])
                log2_axis(axes, "k (attempts)")
            figures.unit_axis(left, "y")
            left.set_title(f"{benchmark}: pass@k")
            right.set_title(f"pass@k minus that of {models[0]}")
            right.axhline(0, color=line_styles[models[0]]["color"], linewidth=1, zorder=0)
        figures.add_legend(figure, {model: line_styles[model] for model in models})
    return figure
