"""When the stages of training steps were under way: spans on one clock, which may overlap."""

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, NamedTuple

from poly_epo_jax.types import Metrics

MERGED_GAP = 0.005  # of a step: spans that lie closer together are one span of its row
Interval = tuple[float, float]
"""Start and end, in seconds."""


def total_seconds(intervals: Iterable[Interval]) -> float:
    """The sum of their lengths."""
    return sum((end - start for start, end in intervals), 0.0)


class BusyTime:
    """Records when at least one of several overlapping pieces of work was under way."""

    def __init__(self) -> None:
        self._running = 0
        self._since = 0.0
        self._past: list[Interval] = []

    @contextmanager
    def work(self) -> Iterator[None]:
        self._begin()
        token = _work.set(self)
        try:
            yield
        finally:
            _work.reset(token)
            self._end()

    def intervals(self) -> list[Interval]:
        """In order, without overlap, in `time.perf_counter`'s seconds; work that is still under way ends now."""
        return [*self._past, (self._since, time.perf_counter())] if self._running else list(self._past)

    def seconds(self) -> float:
        """The total so far, including work that is still under way."""
        return total_seconds(self.intervals())

    def _begin(self) -> None:
        if not self._running:
            self._since = time.perf_counter()
        self._running += 1

    def _end(self) -> None:
        self._running -= 1
        if not self._running:
            self._past.append((self._since, time.perf_counter()))


_work: ContextVar[BusyTime | None] = ContextVar("_work", default=None)


@contextmanager
def waiting() -> Iterator[None]:
    """Pauses the clock of the surrounding work: the time belongs to what is waited for."""
    work = _work.get()
    if work is not None:
        work._end()
    try:
        yield
    finally:
        if work is not None:
            work._begin()


class StageClock:
    """The stages of one step, of which several may be under way at once."""

    def __init__(self) -> None:
        self._stages: dict[str, BusyTime] = {}

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Each `with` adds to the stage."""
        return self.busy(name).work()

    def busy(self, name: str) -> BusyTime:
        return self._stages.setdefault(name, BusyTime())

    def stages(self) -> dict[str, BusyTime]:
        return dict(self._stages)

    def seconds(self) -> Metrics:
        return {f"seconds/{name}": busy.seconds() for name, busy in self._stages.items()}


class Span(NamedTuple):
    """A stage under way from `start` to `end`, in seconds, for the batch of `step`."""

    stage: str
    start: float
    end: float
    step: int


@dataclasses.dataclass(frozen=True)
class Window:
    """Everything that was under way during one step, for any step's batch.

    `start` is in seconds since training began; the spans are relative to it, and end within `seconds`.
    """

    start: float
    seconds: float
    spans: list[Span]

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> "Window":
        """The window that `row` was made from.

        Raises:
          ValueError, KeyError, TypeError: `row` was not made from a window.
        """
        spans = [Span(str(stage), float(start), float(end), int(step)) for stage, start, end, step in row["spans"]]
        return cls(float(row["start"]), max(float(row["seconds"]), 1e-4), spans)

    def critical_seconds(self) -> Metrics:
        """For each stage, the seconds in which nothing else was under way: time that speeding it up is sure to save."""
        alone = alone_intervals(self.spans)
        return {f"critical/{stage}": total_seconds(intervals) for stage, intervals in alone.items()}

    def row(self) -> dict[str, Any]:
        """For JSON, to a tenth of a millisecond; spans that nearly touch are merged, which bounds their number."""
        merged = merge(self.spans, MERGED_GAP * self.seconds)
        spans = [[span.stage, round(span.start, 4), round(span.end, 4), span.step] for span in merged]
        return {"start": round(self.start, 4), "seconds": round(self.seconds, 4), "spans": spans}


class Timeline:
    """The clocks of all steps, cut into consecutive windows without gaps. Starts when created."""

    def __init__(self) -> None:
        self._start = self._cut = time.perf_counter()
        self._clocks: dict[int, StageClock] = {}

    def clock(self, step: int) -> StageClock:
        """The clock of a step, created on first use."""
        return self._clocks.setdefault(step, StageClock())

    def cut(self, step: int) -> Window:
        """What was under way since the last cut. Steps before `step` are over, and are forgotten afterwards."""
        start, end = self._cut, time.perf_counter()
        spans = [
            Span(stage, max(begun, start) - start, min(ended, end) - start, batch_step)
            for batch_step, clock in self._clocks.items()
            for stage, busy in clock.stages().items()
            for begun, ended in busy.intervals()
            if ended > start
        ]
        self._cut = end
        self._clocks = {later: clock for later, clock in self._clocks.items() if later >= step}
        return Window(start - self._start, end - start, sorted(spans, key=lambda span: (span.start, span.end)))


def merge(spans: Iterable[Span], gap: float) -> list[Span]:
    """Joins spans of one stage and step that lie no further apart than `gap` seconds; in order of their starts."""
    merged: dict[tuple[str, int], list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        earlier = merged.setdefault((span.stage, span.step), [])
        if earlier and span.start - earlier[-1].end <= gap:
            earlier[-1] = earlier[-1]._replace(end=max(span.end, earlier[-1].end))
        else:
            earlier.append(span)
    return sorted((span for spans in merged.values() for span in spans), key=lambda span: span.start)


def alone_intervals(spans: Iterable[Span]) -> dict[str, list[Interval]]:
    """For each stage, the intervals in which it was the only one under way."""
    spans = list(spans)
    changes = [(span.start, 1, span.stage) for span in spans] + [(span.end, -1, span.stage) for span in spans]
    alone: dict[str, list[Interval]] = {span.stage: [] for span in spans}
    running: Counter[str] = Counter()
    for (now, change, stage), (then, *_) in pairwise(sorted(changes)):
        running[stage] += change
        under_way = [name for name, count in running.items() if count > 0]
        if len(under_way) == 1 and then > now:
            alone[under_way[0]].append((now, then))
    return alone
