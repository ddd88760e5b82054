"""Displays the progress of a study: a bar per active run on a terminal, or a line per event elsewhere."""

import time
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from poly_epo_jax.study.folder import clock, run_state
from poly_epo_jax.study.plan import StudyRun
from poly_epo_jax.study.queue import ENDED
from poly_epo_jax.system.json_files import Row


class StudyProgress(Progress):
    """Progress display with a bar per active run and the numbers of finished and failed runs.

    Args:
      runs: All runs of the study.
      finished: Number of runs that are finished already.
      console: Console of the display.
    """

    def __init__(self, runs: Sequence[StudyRun], finished: int, console: Console) -> None:
        name, state = (TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[state]"))
        columns = name, BarColumn(24), state, TimeElapsedColumn()
        # Set first, because the constructor of the base class renders the display once.
        self._total, self._finished, self._failed = len(runs), finished, 0
        self._began = time.monotonic()
        self._fractions = {run.key.path: _fraction(run) for run in runs}
        self._work = self._left = sum(1 - fraction for fraction in self._fractions.values())
        self._open = list(runs)  # neither failed nor finished
        super().__init__(*columns, console=console, refresh_per_second=1, disable=not console.is_terminal)
        if self.disable:
            print(self._counts(), flush=True)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Reads the progress of active runs and yields the lines to show. Called by a separate thread."""
        for task in self.tasks:
            state = run_state(task.fields["run"].folder)
            task.total, task.completed = max(state.num_steps, 1), state.step
            task.fields["state"] = str(state) if task.fields["stage"] == "train" else "evaluating"
        yield from super().get_renderables()
        yield Text(f"{self._counts()}, {clock(time.monotonic() - self._began)}", style="bold")

    def started(self, run: StudyRun, stage: str) -> None:
        """Shows that the process of a stage, "train" or "evaluate", has started."""
        self.add_task(run.key.path, run=run, stage=stage, state="")
        if self.disable:
            state = run_state(run.folder)
            resumed = f" from {state}" if stage == "train" and state.step else ""
            print(f"{run.key.path}: {stage}{resumed}", flush=True)

    def _time_left(self) -> str:
        """Returns the estimated remaining time, or an empty string before any training step.

        The estimate assumes that all runs take equally long, and that the same number of them is active until the end.
        """
        done = self._work - self._left + sum(_fraction(run) - self._fractions[run.key.path] for run in self._open)
        if not 0 < done < self._work:
            return ""
        return f", about {clock((time.monotonic() - self._began) * (self._work - done) / done)} left"

    def ended(self, run: StudyRun, row: Row) -> None:
        """Shows that a process has ended, with its row of attempts.jsonl."""
        for task in self.tasks:
            if task.description == run.key.path:
                self.remove_task(task.id)
        is_finished = not row["exit"] and run.is_evaluated()
        self._finished += is_finished
        self._failed += row["exit"] not in (0, *ENDED)
        if row["exit"] or is_finished:  # failed runs are not repeated
            self._left -= 1 - self._fractions[run.key.path]
            self._open = [other for other in self._open if other.key != run.key]
        verb = {"train": "trained", "evaluate": "evaluated"}[row["stage"]]
        if row["exit"]:
            how = "was stopped" if row["exit"] in ENDED else "failed"
            text = f"{run.key.path}: {row['stage']} {how} after {clock(row['seconds'])}: {row['error']}"
        else:
            text = f"{run.key.path}: {verb} in {clock(row['seconds'])}"
        self.console.print(f"{text}  ({self._counts()})", markup=False, highlight=False, soft_wrap=True)

    def _counts(self) -> str:
        return (
            f"{self._finished} of {self._total} runs finished{f', {self._failed} failed' if self._failed else ''}"
            f"{self._time_left()}"
        )


def _fraction(run: StudyRun) -> float:
    """Returns the fraction of the training steps of a run that are logged."""
    state = run_state(run.folder)
    return state.step / state.num_steps if state.num_steps else 0.0
