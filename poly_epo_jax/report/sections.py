"""Builds the page sections of the figures, as HTML."""

import html
from collections.abc import Mapping

from matplotlib.figure import Figure

from poly_epo_jax.metrics.logged import describe
from poly_epo_jax.report import figures, timeline_figures
from poly_epo_jax.report.figures import image
from poly_epo_jax.report.page import metric_list

FIGURES = {
    "evaluation_pass_at_k": (
        "pass@k",
        "Fraction of problems that at least one of k attempts solves. Shaded: 95% intervals over problems.",
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
        "Fraction of held-out problems that at least one of k attempts solves, at the last evaluation.",
    ),
    "training_dynamics": ("Training dynamics", "Lines are smoothed over steps. Faint lines show each step."),
    "timeline": (
        "Timeline",
        "Saturated bars: the stage ran alone. Pale bars: it overlapped with another stage. Color and gray alternate "
        "between consecutive batches.",
    ),
}
"""Title and description of each figure, by file name without suffix."""


def figure_sections(
    drawn: Mapping[str, Figure | None], runs: figures.Runs, timelines: Mapping[str, timeline_figures.Windows]
) -> str:
    """Returns the sections of all figures, as HTML.

    Args:
      drawn: Figures by name. The value is None if there is no data for a figure.
      runs: Rows of metrics.jsonl by run, which determine the metrics that are explained.
      timelines: Windows of timeline.jsonl by run, which are summarized below the timeline.
    """
    logged = {metric for rows in runs.values() for row in rows for metric in row}
    shown = {"comparison": figures.COMPARED, "training_dynamics": figures.drawn_metrics()}
    more = {name: metric_list(map(describe, filter(logged.__contains__, shown[name]))) for name in shown}
    sentences = [
        f"<li><b>{html.escape(label)}</b>: {html.escape(timeline_figures.sentence(windows))}</li>"
        for label, windows in timelines.items()
        if windows
    ]
    more["timeline"] = f"<ul>{''.join(sentences)}</ul>"
    return "\n".join(
        f"<section><h2>{html.escape(title)}</h2><p class='muted'>{html.escape(description)}</p>"
        f"{image(figure, title)}{more.get(name, '')}</section>"
        for name, (title, description) in FIGURES.items()
        if (figure := drawn[name]) is not None
    )
