"""The interactive figures of the page, as data for assets/charts.js.

A section is {"title", "note", "legend": [{"label", "look"}], "panels": [panel]}. A panel is one of
    {"kind": "lines", "title", "x": {"label", "scale": "linear" or "log2"}, "y": {"label"},
     "series": [{"label", "look", "marked", "points": [[x, y, low, high, hover text]], "faint": [[x, y]]}]}
    {"kind": "tree", "title", "longest", "rows", "edges": [[start, end, row, parent row, generations]],
     "leaves": [[length, row, edge row, 1 if right, hover text]]}
    {"kind": "timeline", "title", "look", "seconds", "lanes": [stage], "steps": [[step, start]],
     "bars": [[start, end, lane, 1 if of every other step, the parts alone [[start, end]], hover text]]}
Looks are places in the report's list of labels, the same as in `figures.styles`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from poly_epo_jax.metrics import names
from poly_epo_jax.report import evaluation_figures, figures, timeline_figures
from poly_epo_jax.report.evaluation_figures import Evaluations, Results, Tree
from poly_epo_jax.timeline import total_seconds

MOST_POINTS = 300  # of a line; hovering finds no more on a screen
HOW_BARS_LOOK = (
    "Full colour: nothing else was under way; pale: something else was. Colour and grey take turns with the step whose "
    "batch is worked on."
)
Panel = dict[str, Any]
Section = dict[str, Any]


def run_sections(runs: figures.Runs, labels: Sequence[str]) -> list[Section]:
    """What training did to the held-out metrics, pass@k at the end, and how all metrics went."""
    held_out = [_metric_panel(runs, metric, labels) for metric in figures.COMPARED]
    dynamics = [_metric_panel(runs, metric, labels) for metric in figures.PANELS if metric not in figures.COMPARED]
    last = {label: figures.last_pass_at_k(rows) for label, rows in runs.items()}
    at_end = [
        _series(label, labels, [[k, value, None, None, f"pass@{k}: {_number(value)}"] for k, value in curve.items()])
        for label, curve in last.items()
    ]
    pass_at_k = _lines("Held-out pass@k at the last evaluation", ("k (attempts)", "log2"), "pass@k", at_end)
    return _sections(
        [
            (
                "Held out, during training",
                "Each dot is an evaluation; pass@k is that of the last.",
                [*held_out, pass_at_k],
            ),
            ("Training dynamics", "Smoothed over steps; the faint line is each step.", dynamics),
        ],
        list(runs),
        labels,
    )


def timeline_sections(runs: Mapping[str, timeline_figures.Windows], labels: Sequence[str]) -> list[Section]:
    """What was under way when, a section per run with a timeline."""
    return [
        {
            "title": "Timeline" if len(runs) == 1 else f"Timeline of {label}",
            "note": f"{timeline_figures.sentence(windows)} {HOW_BARS_LOOK}",
            "legend": [],
            "panels": [_bars(excerpt, labels.index(label)) for excerpt in timeline_figures.excerpts(windows)],
        }
        for label, windows in runs.items()
        if windows
    ]


def evaluation_sections(
    evaluations: Evaluations, tree_title: str, trees: Mapping[str, Tree], labels: Sequence[str]
) -> list[Section]:
    """pass@k, majority@k, branching, and the trees, a panel per benchmark."""

    def per_benchmark(make: Any, x: tuple[str, str], y: str, marked: bool = True) -> list[Panel]:
        panels = []
        for benchmark, models in evaluations.items():
            series = [_series(model, labels, make(results), marked) for model, results in models.items()]
            panels.append(_lines(benchmark, x, y, series))
        return panels

    tree_panels = [_tree(model, tree) for model, tree in trees.items()]
    sections = [
        (
            "pass@k",
            "The share of problems that at least one of k attempts solves; shaded: 95% intervals over problems.",
            per_benchmark(_pass_points, ("k (attempts)", "log2"), "pass@k"),
        ),
        (
            "Majority voting",
            "How often the most frequent answer among k is right, over its share of the votes; k grows along the line.",
            per_benchmark(_vote_points, ("majority's share of the votes", "linear"), "accuracy"),
        ),
        (
            "Branching",
            "How many different prefixes a problem's generations have at each token position, as a mean over problems.",
            per_benchmark(_branch_points, ("token position", "log2"), "active branches", marked=False),
        ),
        ("Rollout trees", f"{tree_title}. A dot is right, a cross wrong.", tree_panels),
    ]
    return _sections(sections, evaluation_figures.model_labels(evaluations), labels)


def _sections(
    sections: Sequence[tuple[str, str, Sequence[Panel]]], shown: Sequence[str], labels: Sequence[str]
) -> list[Section]:
    """Those in which something is drawn, panels and lines without points left out."""
    kept = []
    for title, note, panels in sections:
        drawn = [panel for panel in panels if panel.get("series") or panel.get("leaves")]
        if drawn:
            looks = shown if "series" in drawn[0] else ()
            legend = [{"label": label, "look": labels.index(label)} for label in looks]
            kept.append({"title": title, "note": note, "legend": legend, "panels": drawn})
    return kept


def _lines(title: str, x: tuple[str, str], y: str, series: Sequence[dict[str, Any]]) -> Panel:
    drawn = [line for line in series if line["points"]]
    return {"kind": "lines", "title": title, "x": {"label": x[0], "scale": x[1]}, "y": {"label": y}, "series": drawn}


def _series(label: str, labels: Sequence[str], points: list[Any], marked: bool = True) -> dict[str, Any]:
    return {"label": label, "look": labels.index(label), "marked": marked, "points": points, "faint": []}


def _metric_panel(runs: figures.Runs, metric: str, labels: Sequence[str]) -> Panel:
    held_out = names.is_held_out(metric)
    lines = []
    for label, rows in runs.items():
        steps, values = figures.series(rows, metric)
        finite = np.isfinite(values)
        steps, values = steps[finite], values[finite]
        smoothed = values if held_out else figures.smooth(values)
        line = _series(label, labels, [], held_out)
        for place in _thinned(len(values)):
            own = "" if held_out else f" (this step: {_number(values[place])})"
            text = f"step {steps[place]}: {_number(smoothed[place])}{own}"
            line["points"].append([int(steps[place]), float(smoothed[place]), None, None, text])
            if not held_out:
                line["faint"].append([int(steps[place]), float(values[place])])
        lines.append(line)
    return _lines(figures.PANELS[metric], ("training step", "linear"), "", lines)


def _pass_points(results: Results) -> list[Any]:
    return [[k, mean, low, high, _estimate(f"pass@{k}", mean, low, high)] for k, mean, low, high in _curve(results)]


def _curve(results: Results) -> list[evaluation_figures.Estimate]:
    curve = evaluation_figures.curve(results, names.PASS)
    return [curve[place] for place in _thinned(len(curve))]


def _vote_points(results: Results) -> list[Any]:
    return [
        [
            vote.share.mean,
            vote.accuracy.mean,
            None,
            None,
            f"k = {vote.k}: {_estimate('accuracy', *vote.accuracy[1:])}; {_estimate('share', *vote.share[1:])}",
        ]
        for vote in evaluation_figures.votes(results)
    ]


def _branch_points(results: Results) -> list[Any]:
    means = results["branching"]["mean"]
    if not means:
        return []
    # As dense as a log axis shows them: every position at first, then ever fewer.
    positions = np.unique(np.geomspace(1, len(means), MOST_POINTS).round().astype(int))
    return [
        [int(position), means[position - 1], None, None, f"token {position}: {_number(means[position - 1])} branches"]
        for position in positions
    ]


def _tree(model: str, tree: Tree) -> Panel:
    def hover_text(leaf: evaluation_figures.Leaf, right: bool) -> str:
        return f"generation {leaf.generation}: {'right' if right else 'wrong'}, {leaf.length} tokens"

    leaves = [
        [leaf.length, leaf.row, leaf.edge_row, int(right), hover_text(leaf, right)]
        for leaf in tree.leaves
        for right in [tree.correct[leaf.generation]]
    ]
    edges = [[edge.start, edge.end, edge.row, edge.parent_row, edge.size] for edge in tree.edges]
    longest = max((leaf.length for leaf in tree.leaves), default=1)
    return {
        "kind": "tree",
        "title": model,
        "longest": longest,
        "rows": len(tree.leaves),
        "edges": edges,
        "leaves": leaves,
    }


def _bars(excerpt: timeline_figures.Excerpt, look: int) -> Panel:
    def hover_text(bar: timeline_figures.Bar) -> str:
        length, alone = bar.end - bar.start, total_seconds(bar.alone)
        share = f"{length / excerpt.seconds:.1%} of {'the step' if len(excerpt.starts) == 1 else 'these steps'}"
        return f"for step {bar.step}: {_number(length)} s, {share}; {_number(alone)} s of it alone"

    lanes = excerpt.stages
    bars = [
        [bar.start, bar.end, lanes.index(bar.stage), int(excerpt.is_odd(bar)), bar.alone, hover_text(bar)]
        for bar in excerpt.bars
    ]
    return {
        "kind": "timeline",
        "title": excerpt.title.capitalize(),
        "look": look,
        "seconds": excerpt.seconds,
        "lanes": lanes,
        "steps": [list(start) for start in excerpt.starts.items()],
        "bars": bars,
    }


def _thinned(length: int) -> list[int]:
    """At most `MOST_POINTS` places of a list, evenly, both ends among them."""
    return np.unique(np.linspace(0, length - 1, min(length, MOST_POINTS)).round().astype(int)).tolist()


def _estimate(name: str, mean: float, low: float | None, high: float | None) -> str:
    interval = "" if low is None or high is None else f" ({_number(low)} to {_number(high)})"
    return f"{name} {_number(mean)}{interval}"


def _number(value: float) -> str:
    return f"{value:.4g}"
