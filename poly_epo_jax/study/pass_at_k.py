"""Compares pass@k of the evaluated runs of a study with each other and with reference models. Does not require JAX.

A reference is a model that is evaluated in the evaluation folder of the study but is not one of its runs, such as the
policy before training with the label `base`.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from poly_epo_jax.metrics.evaluation import PASS, at
from poly_epo_jax.metrics.intervals import Interval, mean_interval
from poly_epo_jax.report import figures
from poly_epo_jax.report.evaluation_figures import curve, log2_axis
from poly_epo_jax.study.figures import add_legend, draw_band, line_styles
from poly_epo_jax.study.results import Cell, StudyResults

EVER_SOLVED = "train/ever_solved"
EVALUATED_PASS_AT_K = (
    "Fraction of the problems that at least one of k generations solves. Lines are means over finished seeds. Shaded: "
    "range over seeds. Black: models that are not runs of the study. The tables also contain the k from which pass@k "
    "is below that of the first of these models (interpolated over log2 k, with the interval of the logarithm over "
    "seeds), and the number of distinct training problems that the generations of a run solved."
)

Curve = Mapping[int, float]
"""pass@k by k."""


def crossing_point(curve: Curve, reference: Curve) -> float:
    """Returns the k from which a curve is below a reference, interpolated linearly over log2 k.

    Args:
      curve: pass@k of a model.
      reference: pass@k of the reference.

    Returns:
      The k of the last crossing, the smallest common k if the curve is below the reference at all of them, or infinity
      if it is not below the reference at the largest common k.
    """
    ks = sorted(curve.keys() & reference.keys())
    above = [curve[k] - reference[k] for k in ks]
    last = max((index for index, difference in enumerate(above) if difference >= 0), default=-1)
    if last in (-1, len(ks) - 1):
        return float(ks[0]) if last == -1 else math.inf
    share = above[last] / (above[last] - above[last + 1])
    return 2 ** (math.log2(ks[last]) + share * math.log2(ks[last + 1] / ks[last]))


def pass_at_k_tables(results: StudyResults, task: str, benchmark: str) -> dict[str, list[list[str]]]:
    """Returns the rows of the tables of a benchmark, each with its header as first row, by title of the table.

    The first table contains pass@k of references and methods at powers of four, the crossing points with the first
    reference and the problems ever solved. The second contains differences from the baseline, paired by seed.

    Args:
      results: Results of the study.
      task: Name of the task.
      benchmark: Label of the benchmark.
    """
    references = {label: _curve(found) for label, found in results.references(task, benchmark).items()}
    curves = _curves(results, task, benchmark)
    ks = _shared_ks([*references.values(), *(one for found in curves.values() for one in found)])
    names = [f"{benchmark}: {at(PASS, k)}" for k in ks]
    first = next(iter(references), "")
    header = ["method", "learning rate", *(at(PASS, k) for k in ks)]
    more = [f"below {first} from k"] * bool(first) + ["problems ever solved"]
    rows = [[label, "-", *(f"{found[k]:.3f}" for k in ks), *["-"] * len(more)] for label, found in references.items()]
    differences = []
    for cell, found in curves.items():
        start = [cell[1], f"{cell[2]:g}"]
        crossing = [_crossing_text([crossing_point(one, references[first]) for one in found])] if first else []
        means = [interval_text(results.interval(cell, name)) for name in names]
        rows.append([*start, *means, *crossing, interval_text(results.interval(cell, EVER_SOLVED), digits=0)])
        compared = [results.difference(cell, name) for name in names]
        if any(compared):
            differences.append([*start, *(interval_text(one, "+") for one in compared)])
    tables = {f"pass@k on {benchmark}": [[*header, *more], *rows]}
    title = f"Difference in pass@k on {benchmark} from {results.baseline}"
    return tables | ({title: [header, *differences]} if differences else {})


def plot_evaluated_pass_at_k(results: StudyResults, task: str, benchmark: str) -> Figure | None:
    """Draws pass@k of the evaluations on a benchmark, with a panel per learning rate. Returns None if there is no data.

    Args:
      results: Results of the study.
      task: Name of the task.
      benchmark: Label of the benchmark.
    """
    curves = _curves(results, task, benchmark)
    rates = sorted({rate for _, _, rate in curves})
    if not rates:
        return None
    references: dict[str, dict[str, Any]] = {
        label: {"label": label, "color": "#000000", "linestyle": linestyle}
        for label, linestyle in zip(
            results.references(task, benchmark), itertools.cycle(("--", ":", "-.")), strict=False
        )
    }
    with figures.panels(len(rates), len(rates), (6.4 / len(rates) ** 0.5, 3.6), sharey=True) as (figure, panels):
        for axes, rate in zip(panels, rates, strict=True):
            for label, style in references.items():
                reference = _curve(results.references(task, benchmark)[label])
                axes.plot(list(reference), list(reference.values()), **style)
            for method, style in line_styles(results).items():
                powers = [
                    {k: value for k, value in one.items() if k.bit_count() == 1}
                    for one in curves.get((task, method, rate), [])
                ]
                seeds = [(np.array(list(one)), np.array(list(one.values()))) for one in powers]
                draw_band(axes, seeds, style, marked=True)
            axes.set_title(f"learning rate {rate:g}" if len(rates) > 1 else "")
            log2_axis(axes, "k (attempts)")
            figures.unit_axis(axes, "y")
        add_legend(figure, results, *(Line2D([], [], **style) for style in references.values()))
    return figure


def _curves(results: StudyResults, task: str, benchmark: str) -> dict[Cell, list[Curve]]:
    """Returns the curves of the finished and evaluated seeds of each method and learning rate."""
    cells = [(task, method, rate) for method in results.methods for rate in results.learning_rates]
    found = {
        cell: [_curve(one.evaluations[benchmark]) for one in results.of(cell) if benchmark in one.evaluations]
        for cell in cells
    }
    return {cell: curves for cell, curves in found.items() if curves}


def _curve(evaluation: Mapping[str, Any]) -> Curve:
    return {point.k: point.mean for point in curve(evaluation, PASS)}


def _shared_ks(curves: Sequence[Curve]) -> list[int]:
    """Returns the powers of four that all curves have."""
    return [k for k in curves[0] if k.bit_count() == k.bit_length() % 2 == 1 and all(k in one for one in curves)]


def _crossing_text(points: Sequence[float]) -> str:
    """Formats the crossing points of the seeds: geometric mean and interval, or their range if some are infinite."""
    finite = np.array([point for point in points if math.isfinite(point)])
    if len(finite) == len(points):
        return interval_text(Interval(*(2**value for value in mean_interval(np.log2(finite)))), digits=0)
    never = f"not in {len(points) - len(finite)} of {len(points)} seeds"
    return f"{finite.min():.0f} to {finite.max():.0f}; {never}" if len(finite) else never


def interval_text(interval: Interval | None, sign: str = "", digits: int = 3) -> str:
    """Formats a mean with its interval in brackets, if it has one. None is a hyphen.

    Args:
      interval: Mean and bounds. The bounds are NaN for a single seed.
      sign: "+" writes the sign of positive numbers.
      digits: Number of decimals.
    """
    if interval is None:
        return "-"
    mean, low, high = (format(value, f"{sign}.{digits}f") for value in interval)
    return mean if math.isnan(interval.low) else f"{mean} [{low}, {high}]"
