"""Writes the report of a study: a page with figures, tables and reproduction details. Does not require JAX."""

import html
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from poly_epo_jax.metrics.logged import describe
from poly_epo_jax.report.document import document, markdown_table, table, text_table
from poly_epo_jax.report.figures import COMPARED, drawn_metrics, image, save
from poly_epo_jax.report.page import settings_section
from poly_epo_jax.study import figures
from poly_epo_jax.study.folder import clock
from poly_epo_jax.study.frontier import plot_frontier
from poly_epo_jax.study.pass_at_k import plot_pass_at_k
from poly_epo_jax.study.results import StudyResults, read_results
from poly_epo_jax.study.tables import Table, pass_at_k_tables, result_tables
from poly_epo_jax.system.json_files import replace_file

INTERVAL_NOTE = (
    "Means over training seeds, with 95% confidence intervals (Student's t) in brackets. Differences from {baseline} "
    "are at the same learning rate and paired by seed. If the interval of a difference contains 0, these seeds do not "
    "distinguish the two methods. A single seed and equal values have no interval. Intervals are not corrected for "
    "multiple comparisons."
)
FRONTIER = (
    "Each point is a method at a learning rate, with 95% intervals over seeds on both axes. Arrows point to the next "
    "higher learning rate. Compare the lines of the methods, not single points. Markers are hollow and differ in size "
    "(larger for higher learning rates), so that overlapping points remain visible."
)
BY_RATE = "The metrics of the frontier by learning rate. Bottom row: differences from the baseline, paired by seed."
PASS_AT_K = "Fraction of held-out problems that at least one of k attempts solves. Shaded: range over seeds."
EVALUATED_PASS_AT_K = (
    "Fraction of the problems that at least one of k generations solves. Lines are means over finished seeds. Shaded: "
    "range over seeds. Black: models that are not runs of the study. The tables also contain the k from which pass@k "
    "is below that of the first of these models (interpolated over log2 k, with the interval of the logarithm over "
    "seeds), and the number of distinct training problems that the generations of a run solved."
)
BY_GENERATIONS = (
    "Held-out metrics by the number of responses that were generated for training, including the responses to prompts "
    "that the update does not train on. Both axes: means over finished seeds. Shaded: range over seeds."
)
CURVES = "Lines are means over finished seeds, smoothed for metrics of each step. Shaded: range over seeds."
BRANCHING = "Number of distinct prefixes of a problem's generations at each token position. Shaded: range over seeds."


def write_study_report(folder: Path) -> Path:
    """Writes report/report.html in the folder of a study, with the current results of its runs, and returns its path.

    Also writes the tables as Markdown, and figures of each task as PNG and PDF.

    Raises:
      ValueError: If the folder does not contain a study, or one of its files is corrupted.
      OSError: If the files cannot be written.
    """
    results = read_results(folder)
    page = folder / "report" / "report.html"
    body = "\n".join([_summary(results), *(_task(results, task) for task in results.tasks), _reproduction(results)])
    replace_file(page, [document(f"Study: {folder.resolve().name.removeprefix('study-')}", body)])
    replace_file(page.parent / "tables.md", [markdown(results).encode(errors="replace")])
    for task in results.tasks:
        for name, figure in {
            "frontier": plot_frontier(results, task),
            "comparison": figures.plot_comparison(results, task),
            "generations": figures.plot_comparison(results, task, by_generations=True),
        }.items():
            if figure is not None:
                save(figure, page.parent, f"{name}-{task}")
    return page


def _summary(results: StudyResults) -> str:
    finished = sum(one.state.is_finished for one in results.results)
    lines = [f"<b>{finished} of {len(results.results)} runs finished</b>"]
    if unfinished := [one for one in results.results if not one.state.is_finished]:
        named = ", ".join(f"{one.key.path} ({one.state})" for one in unfinished)
        lines.append(
            f"Unfinished runs, which are excluded from all means: {html.escape(named)}. Their curves are thin dotted "
            "lines, and crosses mark their last evaluations"
        )
    if failed := [one.key.path for one in results.results if any(e.get("failed") for e in one.evaluations.values())]:
        lines.append(f"Problems that failed are missing in the evaluations of {html.escape(', '.join(failed))}")
    tasks = [f'<a href="#task-{index}">{html.escape(task)}</a>' for index, task in enumerate(results.tasks)]
    lines.append("On this page: " + ", ".join([*tasks, '<a href="#reproduction">reproduction</a>']))
    return f"<ul class='summary'>{''.join(f'<li>{line}.</li>' for line in lines)}</ul>"


def _task(results: StudyResults, task: str) -> str:
    note = INTERVAL_NOTE.format(baseline=html.escape(results.baseline))
    tables = f"{_tables(result_tables(results, task))}<p class='muted'>{note}</p>"
    parts = [
        f'<section id="task-{results.tasks.index(task)}"><h2>{html.escape(task)}</h2>',
        _figure("Frontier", FRONTIER, plot_frontier(results, task), task),
        tables if results.metrics(task) else "<p>No run has been evaluated yet.</p>",
        _figure("By learning rate", BY_RATE, figures.plot_by_rate(results, task), task),
        _figure("Held-out pass@k", PASS_AT_K, plot_pass_at_k(results, task), task),
        _figure("By generations drawn", BY_GENERATIONS, figures.plot_comparison(results, task, True), task),
        f"<h3>During training</h3><p class='muted'>{CURVES}</p>",
    ]
    for metric in (*COMPARED, *drawn_metrics()):
        entry = describe(metric)
        parts.append(_figure(entry.title, entry.meaning, figures.plot_curves(results, task, metric), task))
    for benchmark in results.benchmarks(task):
        parts += [
            _figure(f"pass@k on {benchmark}", EVALUATED_PASS_AT_K, plot_pass_at_k(results, task, benchmark), task),
            _tables(pass_at_k_tables(results, task, benchmark)),
            _figure(f"Branching on {benchmark}", BRANCHING, figures.plot_branching(results, task, benchmark), task),
        ]
    return "".join([*parts, "</section>"])


def _figure(title: str, explanation: str, figure: Figure | None, task: str) -> str:
    """Returns a heading, a description and the figure, or an empty string without a figure."""
    if figure is None:
        return ""
    return f"<h3>{html.escape(title)}</h3><p class='muted'>{explanation}</p>{image(figure, f'{title}: {task}')}"


def _tables(tables: Mapping[str, Table]) -> str:
    return "".join(
        (f"<h4>{html.escape(title)}</h4>" if title else "") + text_table(header, rows)
        for title, (header, *rows) in tables.items()
    )


def markdown(results: StudyResults) -> str:
    """Returns Markdown with the tables of each task."""
    parts = ["Means over training seeds, with 95% confidence intervals (Student's t) in brackets."]
    for task in results.tasks:
        tables = result_tables(results, task)
        for benchmark in results.benchmarks(task):
            tables |= pass_at_k_tables(results, task, benchmark)
        parts.append(f"## {task}")
        for title, (header, *rows) in tables.items():
            parts += [f"{title}:"] * bool(title) + ["\n".join(markdown_table(header, rows))]
    return "\n\n".join(parts) + "\n"


def _reproduction(results: StudyResults) -> str:
    """Returns the last section of the page, as HTML."""
    settings = settings_section(
        {one.key.path: one.config for one in results.results}, {one.key.path: one.versions for one in results.results}
    )
    return (
        '<section id="reproduction"><h2>Reproduction</h2>'
        "<p>The command of the study reproduces all runs. With the embedded sampler, the same versions and the same "
        "kind of device, the metrics.jsonl files of the runs are byte-identical.</p>"
        f"{_attempts(results)}</section>{settings}"
    )


def _attempts(results: StudyResults) -> str:
    """Returns a table of run times and failures, with a row per started run."""
    rows = []
    for one in results.results:
        own = [row for row in results.attempts if row["run"] == one.key.path]
        if not own:
            continue
        seconds = {
            stage: sum(row["seconds"] for row in own if row["stage"] == stage) for stage in ("train", "evaluate")
        }
        failures = [
            f"{row['started']}: {row['stage']}, exit code {row['exit']}: {row['error']}" for row in own if row["exit"]
        ]
        state = "finished" if one.state.is_finished else f"<b class='wrong'>{html.escape(str(one.state))}</b>"
        rows.append(
            [
                html.escape(one.key.path),
                state,
                str(sum(row["stage"] == "train" for row in own)),
                clock(seconds["train"]),
                clock(seconds["evaluate"]) if seconds["evaluate"] else "-",
                "<br>".join(map(html.escape, failures)) or "-",
            ]
        )
    if not rows:
        return "<p>No runs have been started by the study command.</p>"
    total, failed = sum(row["seconds"] for row in results.attempts), sum(row["exit"] != 0 for row in results.attempts)
    starts = f"{failed} of {len(results.attempts)} attempts failed or were stopped"
    summary = f"Total time of all runs, including parallel runs: {clock(total)}. {starts}."
    header = ["run", "state", "attempts", "training", "evaluation", "failures"]
    details = f"<details><summary>All runs</summary>{table(header, rows)}</details>"
    return f"<h3>Time and failures</h3><p>{summary}</p>{details}"
