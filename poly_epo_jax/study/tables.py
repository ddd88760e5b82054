"""Builds the tables of a study as text, for its page and its Markdown file. Does not require JAX.

A table is a list of rows. The first row is the header.
"""

import math
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from poly_epo_jax.metrics.evaluation import PASS, at
from poly_epo_jax.metrics.intervals import Interval, interval_text, mean_interval
from poly_epo_jax.study.pass_at_k import Curve, curve_of, curves_of
from poly_epo_jax.study.results import Cell, StudyResults

EVER_SOLVED = "train/ever_solved"
Table = list[list[str]]


def result_tables(results: StudyResults, task: str) -> dict[str, Table]:
    """Returns the tables of a task by title: means (without a title), and differences from the baseline, if any.

    Args:
      results: Results of the study.
      task: Name of the task.
    """
    metrics = results.metrics(task)
    rows = [["method", "learning rate", "seeds", *metrics.values()]]
    for cell in results.cells(task):
        num_runs = sum(one.cell == cell for one in results.results)
        means = [_mean_text(results, cell, name) for name in metrics]
        rows.append([cell[1], f"{cell[2]:g}", f"{len(results.of(cell))} of {num_runs}", *means])
    compared = _differences(results, results.cells(task), metrics, metrics.values())
    return {"": rows} | ({f"Difference from {results.baseline}, by seed": compared} if compared else {})


def pass_at_k_tables(results: StudyResults, task: str, benchmark: str) -> dict[str, Table]:
    """Returns the tables of a benchmark by title.

    The first table contains pass@k of references and methods at powers of four, the crossing points with the first
    reference and the problems ever solved. The second contains differences from the baseline, paired by seed.

    Args:
      results: Results of the study.
      task: Name of the task.
      benchmark: Label of the benchmark.
    """
    references = {label: curve_of(found) for label, found in results.references(task, benchmark).items()}
    curves = {cell: found for cell in results.cells(task) if (found := curves_of(results.of(cell), benchmark))}
    every = [*references.values(), *(one for found in curves.values() for one in found)]
    # Powers of four that all curves have.
    ks = [
        k for k in next(iter(every), ()) if k.bit_count() == k.bit_length() % 2 == 1 and all(k in one for one in every)
    ]
    names = [f"{benchmark}: {at(PASS, k)}" for k in ks]
    titles = [at(PASS, k) for k in ks]
    first = next(iter(references), "")
    more = [f"below {first} from k"] * bool(first) + ["problems ever solved"]
    rows = [["method", "learning rate", *titles, *more]]
    rows += [[label, "-", *(f"{found[k]:.3f}" for k in ks), *["-"] * len(more)] for label, found in references.items()]
    for cell, found in curves.items():
        crossing = [_crossing_text([crossing_point(one, references[first]) for one in found])] if first else []
        means = [_mean_text(results, cell, name) for name in names]
        rows.append([cell[1], f"{cell[2]:g}", *means, *crossing, _mean_text(results, cell, EVER_SOLVED, digits=0)])
    compared = _differences(results, curves, names, titles)
    return ({f"pass@k on {benchmark}": rows} if every else {}) | (
        {f"Difference in pass@k on {benchmark} from {results.baseline}": compared} if compared else {}
    )


def _mean_text(results: StudyResults, cell: Cell, metric: str, digits: int = 3) -> str:
    """Formats the mean of a metric, with the number of seeds if some finished runs of the cell lack the metric."""
    count = len(results.by_seed(cell, metric))
    text = interval_text(results.interval(cell, metric), digits)
    return f"{text} ({count} seeds)" if 0 < count < len(results.of(cell)) else text


def _differences(
    results: StudyResults, cells: Iterable[Cell], metrics: Collection[str], titles: Iterable[str]
) -> Table:
    """Returns a table of the differences from the baseline, paired by seed. Empty if there are none."""
    rows = []
    for cell in cells:
        found = [results.difference(cell, name) for name in metrics]
        if any(found):
            rows.append([cell[1], f"{cell[2]:g}", *(interval_text(one, sign="+") for one in found)])
    return [["method", "learning rate", *titles], *rows] if rows else []


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


def _crossing_text(points: Sequence[float]) -> str:
    """Formats the crossing points of the seeds: geometric mean and interval, or their range if some are infinite."""
    finite = np.array([point for point in points if math.isfinite(point)])
    if len(finite) == len(points):
        return interval_text(Interval(*(2**value for value in mean_interval(np.log2(finite)))), digits=0)
    never = f"not in {len(points) - len(finite)} of {len(points)} seeds"
    return f"{finite.min():.0f} to {finite.max():.0f}; {never}" if len(finite) else never
