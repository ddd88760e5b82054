"""Shows a study while it runs: on a terminal the runs under way, elsewhere a line for each event."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from poly_epo_jax.study.folder import clock, run_state
from poly_epo_jax.study.plan import Run
from poly_epo_jax.study.queue import ENDED, Listener
from poly_epo_jax.system.json_files import Row


class Shown:
    """The runs under way, and how many have finished and failed."""

    def __init__(self, runs: Sequence[Run], finished: int, console: Console) -> None:
        self._total, self._finished, self._failed = len(runs), finished, 0
        self._under_way: dict[str, tuple[Run, str, float]] = {}
        self._console, self._began = console, time.monotonic()
        self._lock = threading.Lock()  # the screen is drawn by a thread of its own
        self.listener = Listener(self._started, self._ended)

    def __rich__(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        with self._lock:
            under_way = list(self._under_way.values())
        for run, stage, began in under_way:
            state = run_state(run.folder)
            told = str(state) if stage == "train" else "evaluating"
            bar = ProgressBar(max(state.num_steps, 1), state.step, width=24)
            table.add_row(Text(_name(run)), bar, told, clock(time.monotonic() - began))
        return Group(table, Text(f"{self._counts()}, {clock(time.monotonic() - self._began)}", style="bold"))

    def _started(self, run: Run, stage: str) -> None:
        with self._lock:
            self._under_way[_name(run)] = (run, stage, time.monotonic())
        if not self._console.is_terminal:
            state = run_state(run.folder)
            resumed = f" from {state}" if stage == "train" and state.step else ""
            print(f"{_name(run)}: {stage}{resumed}", flush=True)

    def _ended(self, run: Run, row: Row) -> None:
        with self._lock:
            self._under_way.pop(_name(run), None)
            done = not row["exit"] and run.is_evaluated()
            self._finished += done
            self._failed += row["exit"] not in (0, *ENDED)
            counts = self._counts()
        verb = {"train": "trained", "evaluate": "evaluated"}[row["stage"]]
        if row["exit"]:
            how = "was ended" if row["exit"] in ENDED else "failed"
            text = f"{_name(run)}: {row['stage']} {how} after {clock(row['seconds'])}: {row['error']}"
        else:
            text = f"{_name(run)}: {verb} in {clock(row['seconds'])}"
        self._console.print(f"{text}  ({counts})", markup=False, highlight=False, soft_wrap=True)

    def _counts(self) -> str:
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._finished} of {self._total} runs finished{failed}"


@contextlib.contextmanager
def shown(runs: Sequence[Run]) -> Iterator[Listener]:
    """Shows the study inside the `with` block. Yields the listener to notify about its runs."""
    console = Console()
    finished = sum(run.is_trained() and run.is_evaluated() for run in runs)
    show = Shown(runs, finished, console)
    if not console.is_terminal:
        yield show.listener
        return
    with Live(show, console=console, refresh_per_second=1):
        yield show.listener


def _name(run: Run) -> str:
    return f"{run.member.task}/{run.member.name}"
