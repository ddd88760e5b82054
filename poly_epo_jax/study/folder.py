"""A study's folder: its files, and how far its runs have come. Needs no JAX.

study.json                  the study's runs: {"baseline": method, "runs": [{"task", "method", "rate", "seed"}]}
attempts.jsonl              one row for each time that a run was trained or evaluated, with the columns of `ATTEMPT`
TASK/METHOD-lrRATE-seedSEED/  run folders, see records/run_folder.py
evaluation/                 evaluations of the finished runs, see evaluate/folder.py
report/                     report.html, tables.md, and figures as PNG and PDF, see page.py
lock                        held by the process that runs the study
"""

import dataclasses
import datetime
import json
from pathlib import Path

from poly_epo_jax.metrics.logged import is_held_out
from poly_epo_jax.records import run_folder
from poly_epo_jax.system.json_files import Columns, Row
from poly_epo_jax.system.json_files import read_rows as read_json_rows

PLAN, ATTEMPTS, LOG, LOCK, EVALUATION = "study.json", "attempts.jsonl", "log.txt", "lock", "evaluation"

ATTEMPT: Columns = {
    "run": str,  # TASK/METHOD-lrRATE-seedSEED
    "stage": str,  # train or evaluate
    "started": str,  # when, in ISO 8601
    "seconds": int | float,
    "exit": int,  # the process's exit code, or 128 + the signal that ended it
    "error": str,  # the last line of its log if it failed, else empty
}


@dataclasses.dataclass(frozen=True)
class RunKey:
    """Identifies a run of a study."""

    task: str
    method: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """The name of the run's folder, inside the task's folder."""
        return f"{self.method}-lr{self.rate:g}-seed{self.seed}"

    @property
    def path(self) -> str:
        """Path of the run's folder, relative to the study's folder."""
        return f"{self.task}/{self.name}"

    @property
    def label(self) -> str:
        """The run's label in evaluations, which hold several tasks."""
        return f"{self.task}-{self.name}"


@dataclasses.dataclass(frozen=True)
class RunState:
    """The step that a run has reached, and its number of steps; both are 0 if it has not begun."""

    step: int = 0
    num_steps: int = 0
    is_finished: bool = False

    def __str__(self) -> str:
        return f"step {self.step} of {self.num_steps}" if self.num_steps else "not started"


def run_state(folder: Path) -> RunState:
    """Returns the progress of a run. It is finished if its last step was logged, evaluated if configured, and saved."""
    try:
        config = run_folder.read_config(folder)
        num_steps, evaluates = int(config["train"]["num_steps"]), bool(config["eval"]["every"])
    except (OSError, ValueError, KeyError, TypeError):
        return RunState()
    row = last_row(folder / run_folder.METRICS)
    step = row.get("step", 0)
    complete = step == num_steps and (not evaluates or any(map(is_held_out, row)))
    saved = (folder / run_folder.CHECKPOINTS / str(num_steps)).is_dir()
    return RunState(step, num_steps, complete and saved)


def clock(seconds: float) -> str:
    """1:02:03"""
    return str(datetime.timedelta(seconds=round(seconds)))


def last_row(metrics: Path) -> Row:
    """Returns the last complete row of a metrics.jsonl, or an empty one. Reads only the end of the file."""
    if not metrics.exists():
        return {}
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 2**16))
        lines = file.read().rpartition(b"\n")[0].rsplit(b"\n", 1)
    try:
        row = json.loads(lines[-1])
        return row | {"step": int(row["step"])}
    except (ValueError, KeyError, TypeError):
        return {}


def read_attempts(folder: Path) -> list[Row]:
    """The rows of attempts.jsonl, the oldest first.

    Raises:
      ValueError: a row is damaged.
    """
    return list(read_json_rows(folder / ATTEMPTS, ATTEMPT))
