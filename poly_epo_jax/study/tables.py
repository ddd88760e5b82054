"""The final metrics of a study's finished runs as tables: one row per method and rate."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from poly_epo_jax.metrics.intervals import Interval
from poly_epo_jax.report.model_card import markdown_table
from poly_epo_jax.study.results import Cell, StudyResults


class ResultRow(NamedTuple):
    """A method at a rate.

    Args:
      finished, asked: the numbers of finished runs and of all runs.
      means, differences: an interval for each of `StudyResults.metrics`, None if there is none; the differences are
        from the baseline, seed by seed.
    """

    method: str
    rate: float
    finished: int
    asked: int
    means: Sequence[Interval | None]
    differences: Sequence[Interval | None]


def result_rows(results: StudyResults, task: str) -> list[ResultRow]:
    """A row for each method and rate of a task, in the order of the study file."""
    metrics = results.metrics(task)

    def row(cell: Cell) -> ResultRow:
        asked = sum(one.cell == cell for one in results.results)
        means = [results.interval(cell, name) for name in metrics]
        return ResultRow(*cell[1:], len(results.of(cell)), asked, means, [results.difference(cell, n) for n in metrics])

    return [row((task, method, rate)) for method in results.methods for rate in results.rates]


def markdown(results: StudyResults) -> str:
    """Two tables per task, for a README or a paper's draft: the means, and the differences from the baseline."""
    parts = []
    for task in results.tasks:
        rows = result_rows(results, task)
        header = ["method", "learning rate", "seeds", *results.metrics(task).values()]
        parts += [f"## {task}", _table(header, rows, lambda row: row.means, "")]
        if any(difference for row in rows for difference in row.differences):
            compared = [row for row in rows if row.method != results.baseline]
            parts += [f"Less {results.baseline}, seed by seed:", _table(header, compared, lambda r: r.differences, "+")]
    return "\n\n".join(parts) + "\n"


def interval_text(interval: Interval, sign: str = "") -> str:
    """A mean with its interval in brackets; a single seed has no interval."""
    mean, low, high = (format(value, f"{sign}.3f") for value in interval)
    return mean if interval.low != interval.low else f"{mean} [{low}, {high}]"


def _table(
    header: Sequence[str],
    rows: Sequence[ResultRow],
    cells: Callable[[ResultRow], Sequence[Interval | None]],
    sign: str,
) -> str:
    lines = []
    for row in rows:
        shown = ["-" if interval is None else interval_text(interval, sign) for interval in cells(row)]
        lines.append([row.method, f"{row.rate:g}", f"{row.finished} of {row.asked}", *shown])
    return "\n".join(markdown_table(header, lines))
