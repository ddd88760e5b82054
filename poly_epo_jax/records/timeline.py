"""Records when the stages of training steps were in progress, as spans on a common clock. Spans may overlap."""

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from poly_epo_jax.types import Metrics

MERGED_GAP = 0.005  # spans separated by less than this fraction of the step are merged in its row
Interval = tuple[float, float]
"""Start and end, in seconds."""


def total_seconds(intervals: Iterable[Interval]) -> float:
    """Returns the total length of the intervals."""
    return sum((end - start for start, end in intervals), 0.0)


class BusyTime:
    """Records when at least one of several overlapping tasks was in progress."""

    def __init__(self) -> None:
        self._running = 0
        self._since = 0.0
        self._past: list[Interval] = []

    @contextmanager
    def work(self) -> Iterator[None]:
        """Records the duration of the context."""
        self._begin()
        token = _work.set(self)
        try:
            yield
        finally:
            _work.reset(token)
            self._end()

    def intervals(self) -> list[Interval]:
        """Returns disjoint intervals in order, in seconds of `time.perf_counter`.

        The interval of tasks in progress ends at the current time.
        """
        return [*self._past, (self._since, time.perf_counter())] if self._running else list(self._past)

    @property
    def is_running(self) -> bool:
        """True while a task is in progress."""
        return self._running > 0

    def seconds(self) -> float:
        """Returns the total time so far, including tasks in progress."""
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
    """Pauses the innermost surrounding `BusyTime.work`, because the time is spent waiting for something else."""
    work = _work.get()
    if work is not None:
        work._end()
    try:
        yield
    finally:
        if work is not None:
            work._begin()


class StageClock:
    """Times of the stages of one step. Several stages may be in progress at once."""

    def __init__(self) -> None:
        self._stages: dict[str, BusyTime] = {}

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Returns a context manager that adds the duration of its context to a stage."""
        return self.busy(name).work()

    def busy(self, name: str) -> BusyTime:
        """Returns the recorded time of a stage, which is created on first use."""
        return self._stages.setdefault(name, BusyTime())

    def stages(self) -> dict[str, BusyTime]:
        """Returns the recorded times by stage."""
        return dict(self._stages)

    def overlap_fraction(self, stage: str, other: str) -> float:
        """Returns the fraction of a stage's time in which another stage was in progress as well."""
        pairs = itertools.product(self.busy(stage).intervals(), self.busy(other).intervals())
        return sum(
            max(0.0, min(ends) - max(starts)) for starts, ends in (zip(*pair, strict=True) for pair in pairs)
        ) / max(self.busy(stage).seconds(), 1e-9)

    def seconds(self) -> Metrics:
        """Returns the metrics seconds/STAGE."""
        return {f"seconds/{name}": busy.seconds() for name, busy in self._stages.items()}


class Span(NamedTuple):
    """A period from `start` to `end`, in seconds, in which a stage was in progress for the batch of `step`."""

    stage: str
    start: float
    end: float
    step: int


@dataclasses.dataclass(frozen=True)
class Window:
    """The stages that were in progress during one step, for the batch of any step.

    Attributes:
      start: Start of the window, in seconds since training began or resumed.
      seconds: Duration of the window.
      spans: Spans with times relative to `start`, which end within `seconds`.
    """

    start: float
    seconds: float
    spans: list[Span]

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> "Window":
        """Creates a window from the result of `Window.row`.

        Raises:
          ValueError, KeyError, TypeError: If `row` is invalid.
        """
        return cls(
            float(row["start"]),
            max(float(row["seconds"]), 1e-4),
            [Span(str(stage), float(start), float(end), int(step)) for stage, start, end, step in row["spans"]],
        )

    def exclusive_seconds(self) -> Metrics:
        """Returns exclusive_seconds/STAGE, the time in which no other stage was in progress."""
        return {
            f"exclusive_seconds/{name}": total_seconds(alone) for name, alone in alone_intervals(self.spans).items()
        }

    def row(self) -> dict[str, Any]:
        """Returns a JSON object with times rounded to 0.1 ms. Adjacent spans are merged to limit their number."""
        spans = [
            [span.stage, round(span.start, 4), round(span.end, 4), span.step]
            for span in merge(self.spans, MERGED_GAP * self.seconds)
        ]
        return {"start": round(self.start, 4), "seconds": round(self.seconds, 4), "spans": spans}


class Timeline:
    """Stage clocks of all steps, and their division into consecutive windows without gaps. Starts when created."""

    def __init__(self) -> None:
        self._start = self._cut = time.perf_counter()
        self._clocks: dict[int, StageClock] = {}

    def clock(self, step: int) -> StageClock:
        """Returns the clock of a step, which is created on first use."""
        return self._clocks.setdefault(step, StageClock())

    def active(self) -> list[str]:
        """Returns the names of the stages in progress. May be called from any thread."""
        return list(
            dict.fromkeys(
                name
                for clock in list(self._clocks.values())
                for name, busy in clock.stages().items()
                if busy.is_running
            )
        )

    def cut(self, step: int) -> Window:
        """Returns the window since the last cut, and deletes the clocks of steps before `step`, which are complete."""
        start, end = self._cut, time.perf_counter()
        spans = [
            Span(stage, max(started, start) - start, min(ended, end) - start, batch_step)
            for batch_step, clock in self._clocks.items()
            for stage, busy in clock.stages().items()
            for started, ended in busy.intervals()
            if ended > start
        ]
        self._cut = end
        self._clocks = {later: clock for later, clock in self._clocks.items() if later >= step}
        return Window(start - self._start, end - start, sorted(spans, key=lambda span: (span.start, span.end)))


def merge(spans: Iterable[Span], gap: float) -> list[Span]:
    """Merges adjacent spans of the same stage and step.

    Args:
      spans: The spans, in any order.
      gap: Maximum time in seconds between spans that are merged.

    Returns:
      The merged spans, in order of their start.
    """
    merged: dict[tuple[str, int], list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        earlier = merged.setdefault((span.stage, span.step), [])
        if earlier and span.start - earlier[-1].end <= gap:
            earlier[-1] = earlier[-1]._replace(end=max(span.end, earlier[-1].end))
        else:
            earlier.append(span)
    return sorted((span for spans in merged.values() for span in spans), key=lambda span: span.start)


def alone_intervals(spans: Iterable[Span]) -> dict[str, list[Interval]]:
    """Returns the intervals of each stage in which no other stage was in progress."""
    spans = list(spans)
    changes = [(span.start, 1, span.stage) for span in spans] + [(span.end, -1, span.stage) for span in spans]
    alone: dict[str, list[Interval]] = {span.stage: [] for span in spans}
    running: Counter[str] = Counter()
    for (now, change, stage), (then, *_) in itertools.pairwise(sorted(changes)):
        running[stage] += change
        in_progress = [name for name, count in running.items() if count > 0]
        if len(in_progress) == 1 and then > now:
            alone[in_progress[0]].append((now, then))
    return alone
