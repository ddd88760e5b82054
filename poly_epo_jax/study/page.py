"""The report of a study: one page of figures, tables, and what is needed to reproduce it. Needs no JAX."""

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from poly_epo_jax.metrics.intervals import Interval
from poly_epo_jax.metrics.logged import describe
from poly_epo_jax.report.document import document, markdown_table, table
from poly_epo_jax.report.figures import COMPARED, drawn_metrics, image, save
from poly_epo_jax.study import figures
from poly_epo_jax.study.frontier import plot_frontier
from poly_epo_jax.study.reproduction import reproduction_section
from poly_epo_jax.study.results import Cell, StudyResults, read_results

INTERVAL_NOTE = (
    "Means over training seeds, in brackets their 95% interval (Student's t): how far the mean would move with other "
    "seeds. The second line is the difference from {baseline} at the same learning rate, seed by seed, with its own "
    "interval; where that holds 0, these seeds do not tell the two apart. One seed has no interval. Nothing is "
    "corrected for the number of comparisons."
)
FRONTIER = (
    "Up is more reward, right is more different right answers. A point is a method at a learning rate, its cross the "
    "95% intervals over seeds; arrows lead to the next higher rate. Compare the methods' lines, not single points. "
    "Marks are hollow, each of its own size, so that points on each other can be told apart; larger is a higher rate."
)
BY_RATE = "The same numbers side by side; below, the differences from the baseline, each run beside that of its seed."
PASS_AT_K = "The share of held-out problems that at least one of k attempts solves; shaded: the range over seeds."
CURVES = "Lines are means over the seeds that finished, smoothed where every step is measured; shaded: their range."
BRANCHING = (
    "How many different prefixes a problem's generations have at each token position; shaded: the range over seeds."
)


def write_study_report(folder: Path) -> Path:
    """Writes report/report.html in a study's folder, with what its runs have measured so far, and returns its path.

    For papers and READMEs, it also writes the tables as Markdown, and two figures of each task as PNG and PDF.

    Raises:
      ValueError: the folder holds no study, or a damaged row.
      OSError: the files cannot be written.
    """
    results = read_results(folder)
    page = folder / "report" / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(
        [_summary(results), *(_task(results, task) for task in results.tasks), reproduction_section(results)]
    )
    title = f"Study: {folder.resolve().name.removeprefix('study-')}"
    page.write_text(document(title, body), encoding="utf-8", errors="replace")
    (page.parent / "tables.md").write_text(markdown(results), encoding="utf-8")
    for task in results.tasks:
        for name, figure in {
            "frontier": plot_frontier(results, task),
            "comparison": figures.plot_comparison(results, task),
        }.items():
            if figure is not None:
                save(figure, page.parent, f"{name}-{task}")
    return page


def _summary(results: StudyResults) -> str:
    finished = sum(one.state.is_finished for one in results.results)
    lines = [f"<b>{finished} of {len(results.results)} runs finished</b>"]
    unfinished = [one for one in results.results if not one.state.is_finished]
    if unfinished:
        named = ", ".join(f"{one.key.path} ({one.state})" for one in unfinished)
        lines.append(
            f"Not finished, and so in no mean: {html.escape(named)}. Their curves are thin dotted lines, their last "
            "evaluations crosses"
        )
    links = [f'<a href="#task-{index}">{html.escape(task)}</a>' for index, task in enumerate(results.tasks)]
    links.append('<a href="#reproduction">how to reproduce it</a>')
    lines.append(f"On this page: {', '.join(links)}")
    return f"<ul class='summary'>{''.join(f'<li>{line}.</li>' for line in lines)}</ul>"


def _task(results: StudyResults, task: str) -> str:
    name = html.escape(task)
    parts = [
        f'<section id="task-{results.tasks.index(task)}"><h2>{name}</h2>',
        _figure("Frontier", FRONTIER, plot_frontier(results, task), task),
        _results_table(results, task),
        _figure("By learning rate", BY_RATE, figures.plot_by_rate(results, task), task),
        _figure("Held-out pass@k", PASS_AT_K, figures.plot_pass_at_k(results, task), task),
        f"<h3>During training</h3><p class='muted'>{CURVES}</p>",
    ]
    for metric in (*COMPARED, *drawn_metrics()):
        entry = describe(metric)
        parts.append(_figure(entry.title, entry.meaning, figures.plot_curves(results, task, metric), task))
    benchmarks = {name for one in results.results if one.key.task == task for name in one.evaluations}
    for benchmark in sorted(benchmarks):
        figure = figures.plot_branching(results, task, benchmark)
        parts.append(_figure(f"Branching on {benchmark}", BRANCHING, figure, task))
    return "".join([*parts, "</section>"])


def _figure(title: str, explanation: str, figure: Figure | None, task: str) -> str:
    """A heading, a line on what is shown, and the figure; empty without a figure."""
    if figure is None:
        return ""
    return f"<h3>{html.escape(title)}</h3><p class='muted'>{explanation}</p>{image(figure, f'{title}: {task}')}"


def _results_table(results: StudyResults, task: str) -> str:
    metrics = results.metrics(task)
    if not metrics:
        return "<p>No run has been evaluated yet.</p>"
    rows = []
    for row in result_rows(results, task):
        seeds = f"{row.finished}"
        if row.finished < row.num_runs:
            seeds = f"<b class='wrong'>{row.finished} of {row.num_runs} finished</b>"
        shown = map(_interval_cell, row.means, row.differences)
        rows.append([html.escape(row.method), f"{row.rate:g}", seeds, *shown])
    note = INTERVAL_NOTE.format(baseline=html.escape(results.baseline))
    header = ["method", "learning rate", "seeds", *map(html.escape, metrics.values())]
    return f"{table(header, rows)}<p class='muted'>{note}</p>"


def _interval_cell(mean: Interval | None, difference: Interval | None) -> str:
    if mean is None:
        return "-"
    less = "" if difference is None else f"<span class='interval'>{interval_text(difference, '+')}</span>"
    return f"{interval_text(mean)}{less}"


class ResultRow(NamedTuple):
    """A method at a rate.

    Args:
      finished, num_runs: the numbers of finished runs and of all runs.
      means, differences: an interval for each of `StudyResults.metrics`, None if there is none; the differences are
        from the baseline, seed by seed.
    """

    method: str
    rate: float
    finished: int
    num_runs: int
    means: Sequence[Interval | None]
    differences: Sequence[Interval | None]


def result_rows(results: StudyResults, task: str) -> list[ResultRow]:
    """A row for each method and rate of a task, in the order of the study file."""
    metrics = results.metrics(task)

    def row(cell: Cell) -> ResultRow:
        num_runs = sum(one.cell == cell for one in results.results)
        means = [results.interval(cell, name) for name in metrics]
        return ResultRow(
            *cell[1:], len(results.of(cell)), num_runs, means, [results.difference(cell, n) for n in metrics]
        )

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
        lines.append([row.method, f"{row.rate:g}", f"{row.finished} of {row.num_runs}", *shown])
    return "\n".join(markdown_table(header, lines))
