"""The figures of a page, each with a line on what it shows, as HTML."""

import html
from collections.abc import Iterable, Mapping

from matplotlib.figure import Figure

from poly_epo_jax.report import figures, timeline_figures
from poly_epo_jax.report.figures import image
from poly_epo_jax.report.quantities import HELD_OUT, QUANTITIES, TRAINING

HOW_BARS_LOOK = (
    "Full colour: nothing else was under way; pale: something else was. Colour and grey take turns with the step whose "
    "batch is worked on."
)
EVALUATION = {
    "evaluation_pass_at_k": (
        "pass@k",
        "The share of problems that at least one of k attempts solves; shaded: 95% intervals over problems.",
    ),
    "majority": (
        "Majority voting",
        "How often the most frequent answer among k is right, over its share of the votes; k grows along the line.",
    ),
    "branches": (
        "Branching",
        "How many different prefixes a problem's generations have at each token position, as a mean over problems.",
    ),
    "rollout_trees": ("Rollout trees", "Generations by their shared prefixes. A dot is right, a cross wrong."),
}
TRAINED = {
    "comparison": ("Held out, during training", "Each dot is an evaluation on problems that are not trained on."),
    "pass_at_k": (
        "Held-out pass@k",
        "The share of held-out problems that at least one of k attempts solves, at the last evaluation.",
    ),
    "training_dynamics": ("Training dynamics", "Lines are smoothed over steps; the faint ones are each step."),
}
"""Maps a figure's file name to its title and a sentence on what it shows."""


def section(title: str, note: str, figure: Figure | None, more: str = "") -> str:
    """A heading, a line of plain text, the figure, and more HTML; empty without a figure."""
    if figure is None:
        return ""
    return (
        f"<section><h2>{html.escape(title)}</h2><p class='muted'>{html.escape(note)}</p>{image(figure, title)}{more}"
        "</section>"
    )


def evaluation_sections(drawn: Mapping[str, Figure | None]) -> str:
    """The sections for the figures of evaluations."""
    return "\n".join(section(title, note, drawn[name]) for name, (title, note) in EVALUATION.items())


def run_sections(drawn: Mapping[str, Figure | None], runs: figures.Runs) -> str:
    """The sections for the figures of runs, with a sentence on each quantity that they show."""
    logged = {metric for rows in runs.values() for row in rows for metric in row}
    meanings = {"comparison": HELD_OUT, "training_dynamics": TRAINING}
    return "\n".join(
        section(title, note, drawn[name], explained(metric for metric in meanings.get(name, ()) if metric in logged))
        for name, (title, note) in TRAINED.items()
    )


def timeline_section(figure: Figure | None, runs: Mapping[str, timeline_figures.Windows]) -> str:
    """The figure of what was under way when, and a sentence per run on what the time of a step goes to."""
    said = [
        f"<li><b>{html.escape(label)}</b>: {html.escape(timeline_figures.sentence(windows))}</li>"
        for label, windows in runs.items()
        if windows
    ]
    return section("Timeline", HOW_BARS_LOOK, figure, f"<ul>{''.join(said)}</ul>")


def explained(metrics: Iterable[str]) -> str:
    """A list that explains these quantities."""
    entries = [
        f"<li><b>{quantity.title}</b>: {quantity.meaning}</li>" for quantity in map(QUANTITIES.get, metrics) if quantity
    ]
    return f"<ul class='meanings'>{''.join(entries)}</ul>" if entries else ""
