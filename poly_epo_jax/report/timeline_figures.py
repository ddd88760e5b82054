"""Draws and summarizes the timeline of a run: the stages of its steps, from timeline.jsonl.

`Windows` maps the steps of a run, in order, to their windows (see `timeline.Window`). Consecutive windows are drawn
without gaps, even if the run was interrupted between them.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

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
"""Names of the stages in sentences, in the order in which a batch passes through the stages. Figures show the keys."""
# Maximum gap in seconds between the two parts of a span that was split at the end of a step. Parts are rounded.
_CUT_APART = 2e-4
_PALE, _GRAY = 0.4, "#777777"


@dataclasses.dataclass(frozen=True)
class TimelineExcerpt:
    """Consecutive steps of a timeline.

    Attributes:
      starts: Start of each step, in seconds from the start of the first.
      seconds: Total length in seconds.
      spans: Merged spans of all stages, with times in seconds from the start of the excerpt.
    """

    starts: dict[int, float]
    seconds: float
    spans: list[Span]

    @property
    def stages(self) -> list[str]:
        """Stages from top to bottom."""
        found = dict.fromkeys(span.stage for span in self.spans)
        return [stage for stage in STAGES if stage in found] + [stage for stage in found if stage not in STAGES]

    @property
    def title(self) -> str:
        """Title of the panel."""
        steps = list(self.starts)
        return f"step {steps[0]} (median length)" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"

    def is_odd(self, span: Span) -> bool:
        """Returns True for the spans of every second step, which are drawn in gray."""
        return (span.step - next(iter(self.starts))) % 2 == 1


def excerpts(windows: Windows) -> list[TimelineExcerpt]:
    """Selects the steps to draw.

    Returns:
      The step whose length is closest to the median (the newest of several), and up to `CONSECUTIVE` consecutive
      steps around it. The second excerpt is omitted if there is only one step. Empty without steps.
    """
    steps = list(windows)
    if not steps:
        return []
    seconds = np.array([windows[step].seconds for step in steps])
    median_index = len(steps) - 1 - int(np.argmin(np.abs(seconds - np.median(seconds))[::-1]))
    first = max(0, min(median_index - 1, len(steps) - CONSECUTIVE))
    around = steps[first : first + CONSECUTIVE]
    return [_excerpt(windows, [steps[median_index]]), *([_excerpt(windows, around)] if len(around) > 1 else [])]


def sentence(windows: Windows) -> str:
    """Summarizes the step time of a run in a few sentences.

    The exclusive time of a stage, in which no other stage runs, is the time that a faster stage is certain to save. All
    values are medians over steps.
    """
    steps = list(windows.values())
    length = float(np.median([step.seconds for step in steps]))
    alone = _largest([_shares(step, alone_intervals(step.spans)) for step in steps])
    in_all = _largest([_shares(step, _busy_intervals(step)) for step in steps])
    overlap = float(np.median([_overlap(step) for step in steps]))
    parts = [
        f"{name} {share}" if index else f"{name} alone takes {share} of it" for index, (name, share) in enumerate(alone)
    ]
    overlapping = f"two or more stages overlap for {overlap:.0%} of it" if overlap >= 0.005 else "no stages overlap"
    text = "; ".join([*([", ".join(parts)] if parts else []), overlapping])
    if overlap >= 0.05:
        text += f". Including overlap: {', '.join(f'{name} {share}' for name, share in in_all)}"
    return f"A step takes {length:.3g} s (median of {len(steps)}). {text[0].upper()}{text[1:]}."


def plot_timeline(runs: Mapping[str, Windows]) -> Figure | None:
    """Draws a row per run: a step of median length, and consecutive steps. Returns None if no run has a timeline."""
    drawn = {label: excerpts(windows) for label, windows in runs.items() if windows}
    if not drawn:
        return None
    columns = max(map(len, drawn.values()))
    line_styles = figures.styles(list(runs))
    with figures.panels(columns * len(drawn), columns, (6.0, 3.2)) as (figure, panels):
        for row, (label, in_row) in enumerate(drawn.items()):
            for axes, excerpt in itertools.zip_longest(panels[columns * row : columns * (row + 1)], in_row):
                if excerpt is None:
                    axes.remove()
                    continue
                _draw_excerpt(axes, excerpt, line_styles[label]["color"])
                axes.set_title(f"{label}: {excerpt.title}" if len(drawn) > 1 else excerpt.title.capitalize())
                axes.set_xlabel("seconds" if row == len(drawn) - 1 else "")
    return figure


def _draw_excerpt(axes: Axes, excerpt: TimelineExcerpt, color: str) -> None:
    stages, alone = excerpt.stages, alone_intervals(excerpt.spans)
    for span in excerpt.spans:
        full = np.array(to_rgb(_GRAY if excerpt.is_odd(span) else color))
        within = ((max(start, span.start), min(end, span.end)) for start, end in alone[span.stage])
        parts_alone = [(start, end) for start, end in within if start < end]
        for parts, drawn in (([(span.start, span.end)], _PALE * full + 1 - _PALE), (parts_alone, full)):
            bars = [(start, end - start) for start, end in parts]
            position = stages.index(span.stage) - 0.36, 0.72
            axes.broken_barh(bars, position, facecolors=[drawn], edgecolors=[drawn], linewidth=0.5)
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
    return TimelineExcerpt(starts, at, merge(spans, _CUT_APART))


def _busy_intervals(window: Window) -> dict[str, list[Interval]]:
    """Returns the intervals in which each stage ran, for any batch."""
    found: dict[str, list[Interval]] = {}
    for span in merge((span._replace(step=0) for span in window.spans), 0.0):
        found.setdefault(span.stage, []).append((span.start, span.end))
    return found


def _overlap(window: Window) -> float:
    """Returns the fraction of the step in which two or more stages ran."""
    anything = Window(0.0, window.seconds, [span._replace(stage="anything") for span in window.spans])
    busy = sum(_shares(anything, _busy_intervals(anything)).values(), 0.0)
    return busy - sum(_shares(window, alone_intervals(window.spans)).values(), 0.0)


def _shares(window: Window, intervals: Mapping[str, list[Interval]]) -> dict[str, float]:
    return {stage: total_seconds(parts) / window.seconds for stage, parts in intervals.items()}


def _largest(shares: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Returns names and median fractions of the three largest stages with at least 1%, in descending order."""
    stages = dict.fromkeys(stage for step in shares for stage in step)
    medians = {stage: float(np.median([step.get(stage, 0.0) for step in shares])) for stage in stages}
    largest = sorted((stage for stage in stages if medians[stage] >= 0.01), key=lambda stage: -medians[stage])
    return [(STAGES.get(stage, stage), f"{medians[stage]:.0%}") for stage in largest[:3]]
