"""Progress displays for long computations: a live screen or bar on a terminal, otherwise a line every ten seconds.

While a display is open, a line names the calls that the process awaits if none has begun or ended for 20 seconds, and
again whenever this time has doubled.
"""

import contextlib
import datetime
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from poly_epo_jax.metrics.logged import (
    HELD_OUT_CORRECT_CLUSTERS,
    HELD_OUT_REWARD,
    HELD_OUT_SOLVED,
    LOGGED_METRICS,
    describe,
    is_held_out,
)
from poly_epo_jax.system.pending_calls import pending_calls
from poly_epo_jax.types import Metrics

_HELD_OUT = (HELD_OUT_REWARD, HELD_OUT_SOLVED, HELD_OUT_CORRECT_CLUSTERS)
_SECONDS_BETWEEN_LINES = 10.0
_WAITING_SECONDS = 20.0  # time without progress after which pending calls are named
_SPEED_SECONDS = 3600.0  # window of the speed estimate; Rich's default of 30 s is too short for slow steps


@contextlib.contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows the progress of a long computation and an estimate of the remaining time.

    If the output is not a terminal, the yielded function prints a line when it is called for the first time, when ten
    seconds have passed since the previous line, and when all items are processed.

    Args:
      description: Description of the computation.
      total: Number of items to process.

    Yields:
      A function to be called with the number of processed items.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console()
    progress = Progress(
        *columns,
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        speed_estimate_period=_SPEED_SECONDS,
    )
    bar = progress.add_task(description, total=total)
    lines = _Lines()

    def show(done: int) -> None:
        progress.update(bar, completed=done)
        if not console.is_terminal and lines.due(done == total):
            print("  ".join([f"{description} {done}/{total}", *_time_left(progress)]), flush=True)

    with progress, WaitingLines():
        yield show


class TrainingProgress:
    """Progress display of a training run.

    On a terminal, it is a live screen. Otherwise, a line is printed at the beginning, for the first step, the last step
    and each evaluation, at the first failure of each kind, and if ten seconds have passed since the previous line. Each
    line contains the failures and repetitions since the previous line, and the last line those of all steps.

    Args:
      total_steps: Last step of the run.
      first_step: Step from which training continues.
      title: Name and method of the run.

    Attributes:
      active_stages: Returns the names of the stages in progress, for the live screen.
    """

    def __init__(self, total_steps: int, first_step: int, title: str) -> None:
        self.active_stages: Callable[[], list[str]] = list
        self._total_steps, self._first_step = total_steps, first_step
        resumed = f"resumes after step {first_step} of {total_steps}" if first_step else f"{total_steps} steps"
        self._title, self._compiles = f"{title}, {resumed}", first_step < total_steps
        self._latest: Metrics = {}
        self._held_out = {name: describe(name).brief for name in _HELD_OUT}
        self._training = {
            name: metric.brief for name, metric in LOGGED_METRICS.items() if metric.brief and not is_held_out(name)
        }
        self._evaluated_at: int | None = None
        self._fallbacks, self._unprinted = _Fallbacks(), _Fallbacks()
        self._lines = _Lines()
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            expand=True,
            speed_estimate_period=_SPEED_SECONDS,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=first_step)
        console = Console()
        self._live: Live | None = None
        self._waiting = WaitingLines().__enter__()
        if console.is_terminal:
            self._live = Live(get_renderable=self._screen, console=console, refresh_per_second=2)
            self._live.start()
        else:
            note = "; the first evaluation and step also compile programs" if self._compiles else ""
            print(f"{self._title}{note}.", flush=True)

    def show(self, step: int, values: Metrics) -> None:
        """Shows the metrics and times of a step.

        Args:
          step: The step.
          values: Metrics and times by name. Other values keep their last state on the live screen.
        """
        self._latest |= values
        known = self._fallbacks.texts()
        self._fallbacks.add(values)
        self._unprinted.add(values)
        is_new = self._fallbacks.texts().keys() > known.keys()
        evaluated = any(name in values for name in _HELD_OUT)
        if evaluated:
            self._evaluated_at = step
        self._compiles &= step == self._first_step
        self._progress.update(self._task, completed=step)
        if self._live is not None:
            self._live.refresh()
        elif self._lines.due(evaluated or is_new or step == self._total_steps):
            print(self._line(step, values), flush=True)

    def close(self) -> None:
        """Stops the live screen, and prints the number of failures and repetitions, if there were any."""
        self._waiting.__exit__()
        if self._live is not None:
            self._live.stop()
        if texts := self._fallbacks.texts():
            print(f"Since step {self._first_step}: {', '.join(texts.values())}.", flush=True)

    def _screen(self) -> Group:
        stages = {name: name.removeprefix("seconds/") for name in self._latest if name.startswith("seconds/")}
        evaluated = "" if self._evaluated_at is None else f" (step {self._evaluated_at})"
        blocks = [
            _block("training", self._latest, self._training),
            _block(f"held out{evaluated}", self._latest, self._held_out),
            _block(
                "seconds",
                self._latest,
                stages | {"sync/step_fraction": "sync fraction", "tokens_per_second": "tokens/s"},
            ),
        ]
        stage = ", ".join(self.active_stages()) or "waiting"
        status = Text(f"stage: {stage}{' (compiles programs)' if self._compiles else ''}")
        counted = [Text(text, style="yellow") for text in self._fallbacks.texts().values()]
        return Group(Text(self._title, style="bold"), self._progress, status, Columns(blocks, padding=(1, 2)), *counted)

    def _line(self, step: int, values: Metrics) -> str:
        parts = [f"step {step}/{self._total_steps}"]
        labels = self._training | {name: f"held-out {label}" for name, label in self._held_out.items()}
        parts += [f"{label} {_number(values[name])}" for name, label in labels.items() if name in values]
        parts += self._unprinted.texts().values()
        self._unprinted = _Fallbacks()
        units = {"tokens_per_second": "tokens/s", "seconds/step": "s"}
        parts += [f"{_number(values[name])} {unit}" for name, unit in units.items() if name in values]
        return "  ".join([*parts, *_time_left(self._progress)])


class _Fallbacks:
    """Sums the metrics of failures and repetitions (`LoggedMetric.fallback`), and averages those that are fractions."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {name: [] for name, one in LOGGED_METRICS.items() if one.fallback}

    def add(self, values: Metrics) -> None:
        """Adds the metrics of a step."""
        for name in self._values.keys() & values.keys():
            self._values[name].append(values[name])

    def texts(self) -> dict[str, str]:
        """Returns a text for each metric that was not always 0, by name."""
        found = {name: (LOGGED_METRICS[name], values) for name, values in self._values.items() if any(values)}
        return {
            name: f"{one.title.lower()} {_number(statistics.fmean(values)) if one.unit_axis else f'{sum(values):,.0f}'}"
            for name, (one, values) in found.items()
        }


class _Lines:
    """Limits the rate of printed lines to one every ten seconds, except for requested lines."""

    def __init__(self) -> None:
        self._next_at = -math.inf

    def due(self, requested: bool) -> bool:
        """Returns True if a line is due: at the first call, if requested, or ten seconds after the last line."""
        if not requested and time.monotonic() < self._next_at:
            return False
        self._next_at = time.monotonic() + _SECONDS_BETWEEN_LINES
        return True


class WaitingLines:
    """Prints lines that name the calls that the process awaits, in the background of a context."""

    def __init__(self) -> None:
        self._next_at, self._closed = _WAITING_SECONDS, threading.Event()

    def __enter__(self) -> "WaitingLines":
        threading.Thread(target=self._run, name="waiting lines", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def update(self) -> None:
        """Prints a line if it is due."""
        calls, seconds = pending_calls()
        if seconds < _WAITING_SECONDS:
            self._next_at = _WAITING_SECONDS
        elif calls and seconds >= self._next_at:
            self._next_at = 2 * seconds
            print(f"No progress for {seconds:.0f} s. Waiting for {calls}.", flush=True)

    def _run(self) -> None:
        while not self._closed.wait(1.0):
            self.update()


def _time_left(progress: Progress) -> list[str]:
    """Returns a list with the remaining time of the task as text. The list is empty if the time is unknown or 0."""
    left = progress.tasks[0].time_remaining
    return [f"{datetime.timedelta(seconds=int(left))} left"] if left else []


def _block(title: str, values: Metrics, labels: Mapping[str, str]) -> Table:
    table = Table(
        Column(title, header_style="bold"),
        Column(justify="right", min_width=6),
        box=None,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name, label in labels.items():
        table.add_row(label, _number(values[name]) if name in values else "-")
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}"
