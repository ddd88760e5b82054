"""What was under way when in a run's steps: the windows of timeline.jsonl in, bars, a sentence and a figure out.

`Windows` are a run's steps in order (see `timeline.Window`). They follow each other without a gap.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from poly_epo_jax.records.timeline import Interval, Span, Window, alone_intervals, merge, total_seconds
from poly_epo_jax.report import figures

Windows = Mapping[int, Window]

CONSECUTIVE = 4
STAGES = {
    "generate": "generation",
    "grade": "grading",
    "judge": "judging",
    "exchange": "waiting for other processes",
    "advantages": "advantages",
    "logprobs": "log-probabilities",
    "update": "update",
    "sync": "weight sync",
    "evaluate": "evaluation",
    "checkpoint": "checkpointing",
}
"""The stages in the order in which a batch passes through them, with their names in a sentence."""
_CUT_APART = 2e-4  # seconds: a span that crosses from one step to the next was cut in two, and each end rounded
_PALE, _GRAY = 0.4, "#777777"


class Bar(NamedTuple):
    """A stage that was under way for the batch of `step`, and the parts of that time in which no other stage was."""

    stage: str
    start: float
    end: float
    step: int
    alone: list[Interval]


@dataclasses.dataclass(frozen=True)
class TimelineExcerpt:
    """Consecutive steps: when each begins, in seconds from the start of the first, and the bars of every stage."""

    starts: dict[int, float]
    seconds: float
    bars: list[Bar]

    @property
    def stages(self) -> list[str]:
        """The stages from top to bottom."""
        found = dict.fromkeys(bar.stage for bar in self.bars)
        return [stage for stage in STAGES if stage in found] + [stage for stage in found if stage not in STAGES]

    @property
    def title(self) -> str:
        steps = list(self.starts)
        return f"step {steps[0]}, of median length" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"

    def is_odd(self, bar: Bar) -> bool:
        """Whether the bar belongs to every other step; neighbouring batches are drawn differently."""
        return (bar.step - next(iter(self.starts))) % 2 == 1


def excerpts(windows: Windows) -> list[TimelineExcerpt]:
    """The newest of the steps closest to the median length, and a few consecutive steps around it, if there are any."""
    steps = list(windows)
    if not steps:
        return []
    seconds = np.array([windows[step].seconds for step in steps])
    off = np.abs(seconds - np.median(seconds))
    median_index = len(steps) - 1 - int(np.argmin(off[::-1]))
    first = max(0, min(median_index - 1, len(steps) - CONSECUTIVE))
    around = steps[first : first + CONSECUTIVE]
    return [_excerpt(windows, [steps[median_index]]), *([_excerpt(windows, around)] if len(around) > 1 else [])]


def sentence(windows: Windows) -> str:
    """How much of a step the stages take, as medians: alone, which speeding them up is certain to save, and in all."""
    steps = list(windows.values())
    length = float(np.median([step.seconds for step in steps]))
    alone = _largest([_shares(step, alone_intervals(step.spans)) for step in steps])
    in_all = _largest([_shares(step, _busy_intervals(step)) for step in steps])
    overlap = float(np.median([_overlap(step) for step in steps]))
    parts = [
        f"{name} {share}" if index else f"{name} alone takes {share} of it" for index, (name, share) in enumerate(alone)
    ]
    overlapping = f"for {overlap:.0%} two or more are under way" if overlap >= 0.005 else "nothing overlaps"
    text = "; ".join([*([", ".join(parts)] if parts else []), overlapping])
    if overlap >= 0.05:
        text += f". Under way at all: {', '.join(f'{name} {share}' for name, share in in_all)}"
    return f"A step takes {length:.3g} s (median of {len(steps)}). {text[0].upper()}{text[1:]}."


def plot_timeline(runs: Mapping[str, Windows]) -> Figure | None:
    """One row per run: a step of median length, and a few consecutive steps. None if no run has a timeline."""
    drawn = {label: excerpts(windows) for label, windows in runs.items() if windows}
    if not drawn:
        return None
    columns = max(map(len, drawn.values()))
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(6.0 * columns, 3.2 * len(drawn)), dpi=figures.DPI, layout="constrained")
        grid = figure.subplots(len(drawn), columns, squeeze=False)
        line_styles = figures.styles(list(runs))
        for row, (label, panels) in zip(grid, drawn.items(), strict=True):
            for axes, excerpt in zip(row, panels, strict=False):
                _draw_excerpt(axes, excerpt, line_styles[label]["color"])
                axes.set_title(f"{label}: {excerpt.title}" if len(drawn) > 1 else excerpt.title.capitalize())
            for axes in row[len(panels) :]:
                axes.remove()
        for axes in grid[-1][: len(list(drawn.values())[-1])]:
            axes.set_xlabel("seconds")
    return figure


def _draw_excerpt(axes: Axes, excerpt: TimelineExcerpt, color: str) -> None:
    stages = excerpt.stages
    for bar in excerpt.bars:
        full = np.array(to_rgb(_GRAY if excerpt.is_odd(bar) else color))
        for parts, drawn in (([(bar.start, bar.end)], _PALE * full + 1 - _PALE), (bar.alone, full)):
            spans = [(start, end - start) for start, end in parts]
            position = stages.index(bar.stage) - 0.36, 0.72
            axes.broken_barh(spans, position, facecolors=[drawn], edgecolors=[drawn], linewidth=0.5)
    for start in list(excerpt.starts.values())[1:]:
        axes.axvline(start, color="#888888", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(stages)), stages)
    axes.set_ylim(len(stages) - 0.5, -0.5)
    axes.set_xlim(0, excerpt.seconds)
    axes.grid(axis="y", visible=False)


def _excerpt(windows: Windows, steps: list[int]) -> TimelineExcerpt:
    starts, spans, at = {}, [], 0.0
    for step in steps:
        starts[step] = at
        spans += [span._replace(start=at + span.start, end=at + span.end) for span in windows[step].spans]
        at += windows[step].seconds
    spans = merge(spans, _CUT_APART)
    alone = alone_intervals(spans)
    return TimelineExcerpt(starts, at, [Bar(*span, _parts_within(span, alone[span.stage])) for span in spans])


def _parts_within(span: Span, alone: list[Interval]) -> list[Interval]:
    return [
        (max(start, span.start), min(end, span.end)) for start, end in alone if start < span.end and end > span.start
    ]


def _busy_intervals(window: Window) -> dict[str, list[Interval]]:
    """The times at which each stage was under way, for any batch."""
    found: dict[str, list[Interval]] = {}
    for span in merge((span._replace(step=0) for span in window.spans), 0.0):
        found.setdefault(span.stage, []).append((span.start, span.end))
    return found


def _overlap(window: Window) -> float:
    """The share of the step during which two or more stages were under way."""
    anything = Window(0.0, window.seconds, [span._replace(stage="anything") for span in window.spans])
    busy = sum(_shares(anything, _busy_intervals(anything)).values(), 0.0)
    return busy - sum(_shares(window, alone_intervals(window.spans)).values(), 0.0)


def _shares(window: Window, intervals: Mapping[str, list[Interval]]) -> dict[str, float]:
    return {stage: total_seconds(parts) / window.seconds for stage, parts in intervals.items()}


def _largest(shares: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """The names and median shares of up to three stages that have at least 1%, the largest first."""
    stages = dict.fromkeys(stage for step in shares for stage in step)
    medians = {stage: float(np.median([step.get(stage, 0.0) for step in shares])) for stage in stages}
    largest = sorted((stage for stage in stages if medians[stage] >= 0.01), key=lambda stage: -medians[stage])
    return [(STAGES.get(stage, stage), f"{medians[stage]:.0%}") for stage in largest[:3]]
