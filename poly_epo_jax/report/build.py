"""Writes a report: reads the folders, draws the figures and writes the page."""

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from poly_epo_jax.metrics.logged import describe
from poly_epo_jax.report import audits, evaluation_figures, figures, timeline_figures
from poly_epo_jax.report.document import POLICY, asset, document
from poly_epo_jax.report.folders import EvaluationFolders, RunRecords, read_folders, read_results
from poly_epo_jax.report.generations import Collection, bound, evaluation_collection, run_collections
from poly_epo_jax.report.page import (
    bands_section,
    evaluation_summaries,
    final_values,
    metric_list,
    metrics_table,
    results_tables,
    run_summary,
    settings_section,
)
from poly_epo_jax.report.rollout_trees import Rollouts, plot_rollout_trees
from poly_epo_jax.system.json_files import replace_file
from poly_epo_jax.system.output_folder import check_output, starts_with
from poly_epo_jax.types import DEGENERATE_CLUSTER

MAX_GENERATION_BYTES = 8_000_000
TREE_ROLLOUTS = 12


FIGURES = {
    "evaluation_pass_at_k": (
        "pass@k",
        "Fraction of problems that at least one of k attempts solves, and its difference from the first model, on the "
        "same problems. Shaded: 95% intervals over problems, by the method below the results, and bootstrap intervals "
        "of the mean difference, with two additional problems. These can exclude 0 although the intervals of the two "
        "curves overlap.",
    ),
    "majority": (
        "Majority voting",
        "Accuracy of the most frequent answer among k over its share of the votes. k increases along the line.",
    ),
    "branches": (
        "Branching",
        "Number of distinct prefixes of a problem's generations at each token position, mean over problems.",
    ),
    "rollout_trees": (
        "Rollout trees",
        "Generations arranged by shared prefix. Dots mark correct responses, crosses incorrect ones.",
    ),
    "comparison": (
        "Held-out metrics during training",
        "Each dot is an evaluation on problems that are not used for training.",
    ),
    "pass_at_k": (
        "Held-out pass@k",
        "Fraction of held-out problems that at least one of k attempts solves, at the last evaluation and, for the "
        "base policy, before the first step. k ends at half of the attempts: single attempts decide pass@k of all.",
    ),
    "training_dynamics": ("Training dynamics", "Lines are smoothed over steps. Faint lines show each step."),
    "audit": (
        "Audit of the judge",
        "Inflation: clusters of the training judge divided by clusters of the auditor. Shaded: 95% intervals over "
        "prompts. An inflation that rises while the clusters of the auditor do not means that the policy learns to "
        "differ in what the judge calls different.",
    ),
    "timeline": (
        "Timeline",
        "Saturated bars: the stage ran alone. Pale bars: it overlapped with another stage. Color and gray alternate "
        "between consecutive batches.",
    ),
}
"""Title and description of each figure, by file name without suffix."""


def write_report(folders: Sequence[Path], output: Path, models: Sequence[str] = ()) -> Path:
    """Writes the figures and the page of a report.

    Args:
      folders: Folders of runs and evaluations.
      output: Folder of the report. Created if it does not exist.
      models: Labels of the models of evaluations to show, in this order. If empty, all models are shown.

    Returns:
      The path of the page.

    Raises:
      ValueError: If a folder is missing, contains neither a run nor an evaluation, or contains links or a corrupted
        file, if a model is not found, or if `output` contains other files than a report.
      OSError: If `output` cannot be written.
    """
    runs, evaluations = read_folders(folders, models)
    results = {
        benchmark: {model: read_results(folder) for model, folder in by_model.items()}
        for benchmark, by_model in evaluations.items()
    }
    collections = [collection for label, run in runs.items() for collection in run_collections(label, run.folder)]
    problem, evaluation_collections, trees = _read_generations(evaluations, results)
    collections, bounds = bound([*evaluation_collections, *collections], MAX_GENERATION_BYTES)

    metrics = {label: run.metrics for label, run in runs.items()}
    timelines = {label: run.timeline for label, run in runs.items()}
    tree_title = f"First {TREE_ROLLOUTS} generations of {problem}, arranged by shared prefix" if trees else ""
    line_styles = figures.styles(list(dict.fromkeys([*runs, *evaluation_figures.model_labels(evaluations)])))
    page = output / "report.html"
    _create(page)
    drawn = _draw_figures(metrics, results, tree_title, trees, line_styles)
    drawn["timeline"] = timeline_figures.plot_timeline(timelines)
    drawn["audit"], audit_details = _audits(runs)

    summaries = evaluation_summaries(results) if results else []
    summaries += [run_summary(label, rows) for label, rows in metrics.items()]
    body = [
        f"<ul class='summary'>{''.join(f'<li>{summary}</li>' for summary in summaries)}</ul>",
        results_tables(results, line_styles),
        _figure_sections(drawn, metrics, timelines, audit_details),
        asset("browser.html"),
        bands_section({label: run for label, run in runs.items() if run.config}),
        settings_section(
            {label: run.config for label, run in runs.items()}, {label: run.versions for label, run in runs.items()}
        ),
        metrics_table({label: final_values(run.metrics + run.timing) for label, run in runs.items()}) if runs else "",
        "<footer class='muted'>All figures are also available as PNG and PDF files next to this page.</footer>",
    ]
    data = {"collections": collections, "bounds": vars(bounds), "degenerate": DEGENERATE_CLUSTER}
    title = " · ".join([*evaluations, *(run.folder.resolve().name for run in runs.values())])
    replace_file(page, [document(title, "\n".join(body), data)])  # first, because it identifies the folder of a report
    for name, figure in drawn.items():
        if figure is not None:
            figures.save(figure, output, name)
    return page


def _audits(runs: Mapping[str, RunRecords]) -> tuple[Figure | None, str]:
    """Returns the figure of the audits, and HTML below it. The figure is None if no run was audited."""
    sizes = {label: run.config.get("algo", {}).get("set_size", 1) for label, run in runs.items() if run.audit}
    figure = audits.plot_audits({label: runs[label].audit for label in sizes}, sizes)
    return figure, "".join(
        audits.audit_details(label, runs[label].folder, runs[label].audit, sizes[label]) for label in sizes
    )


def _create(page: Path) -> None:
    check_output(page.parent, "report", is_known=starts_with(page, re.escape(POLICY)))
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(
            f"The report folder {page.parent} cannot be created ({reason}); choose another --output."
        ) from error


def _figure_sections(
    drawn: Mapping[str, Figure | None],
    runs: figures.Runs,
    timelines: Mapping[str, timeline_figures.Windows],
    audit_details: str,
) -> str:
    """Returns the sections of all figures, as HTML.

    Args:
      drawn: Figures by name. The value is None if there is no data for a figure.
      runs: Rows of metrics.jsonl by run, which determine the metrics that are explained.
      timelines: Windows of timeline.jsonl by run, which are summarized below the timeline.
      audit_details: HTML below the figure of the audits.
    """
    logged = {metric for rows in runs.values() for row in rows for metric in row}
    shown = {"comparison": figures.COMPARED, "training_dynamics": figures.drawn_metrics(runs)}
    more = {
        name: metric_list((describe(metric).title, describe(metric).meaning) for metric in metrics if metric in logged)
        for name, metrics in shown.items()
    }
    sentences = [
        f"<li><b>{html.escape(label)}</b>: {html.escape(timeline_figures.sentence(windows))}</li>"
        for label, windows in timelines.items()
        if windows
    ]
    more |= {"timeline": f"<ul>{''.join(sentences)}</ul>", "audit": audit_details}
    return "\n".join(
        f"<section><h2>{html.escape(title)}</h2><p class='muted'>{html.escape(description)}</p>"
        f"{figures.image(figure, title)}{more.get(name, '')}</section>"
        for name, (title, description) in FIGURES.items()
        if (figure := drawn[name]) is not None
    )


def _draw_figures(
    metrics: figures.Runs,
    results: evaluation_figures.Evaluations,
    tree_title: str,
    trees: dict[str, Rollouts],
    line_styles: evaluation_figures.LineStyles,
) -> dict[str, Figure | None]:
    return {
        "training_dynamics": figures.plot_training_dynamics(metrics),
        "pass_at_k": evaluation_figures.plot_held_out_pass_at_k(metrics),
        "comparison": figures.plot_comparison(metrics),
        "evaluation_pass_at_k": evaluation_figures.plot_with_differences(results, line_styles),
        "majority": evaluation_figures.plot_majority(results, line_styles),
        "branches": evaluation_figures.plot_branches(results, line_styles),
        "rollout_trees": plot_rollout_trees(tree_title, trees, line_styles),
    }


def _read_generations(
    evaluations: EvaluationFolders, results: evaluation_figures.Evaluations
) -> tuple[str | None, list[Collection], dict[str, Rollouts]]:
    """Returns the problem of the rollout trees, the collections of all evaluations, and the trees by model.

    Only the first two models of the first benchmark have a tree.
    """
    collections, trees, problem = [], {}, None
    for index, (benchmark, folders) in enumerate(evaluations.items()):
        in_tree = list(folders)[:2] if index == 0 else []
        if in_tree:
            solved = {
                row["problem"]: row["num_correct"] / max(row["num_generations"], 1)
                for row in results[benchmark][in_tree[0]]["per_problem"]
            }
            problem = min(solved, key=lambda problem: abs(solved[problem] - 0.5), default=None)
        for model, folder in folders.items():
            wanted = problem if model in in_tree else None
            collection, rollouts = evaluation_collection(model, benchmark, folder, wanted, TREE_ROLLOUTS)
            if collection is not None:
                collections.append(collection)
            if rollouts:
                trees[model] = list(rollouts.values())
    return problem, collections, trees
