"""Files of a study, and the progress of its runs. Does not require JAX.

study.json                  baseline and runs: {"baseline": method, "runs": [{"task", "method", "rate", "seed"}]}
attempts.jsonl              one row per process that trained or evaluated a run, with the columns of `ATTEMPT`
TASK/METHOD-lrRATE-seedSEED/  run folders, see records/run_folder.py
evaluation/                 evaluations of finished runs, see evaluate/folder.py
report/                     report.html, tables.md, and figures as PNG and PDF, see page.py
lock                        locked by the process that executes the study
"""

import dataclasses
import datetime
import json
import re
from pathlib import Path

from poly_epo_jax.metrics.logged import is_held_out
from poly_epo_jax.records import run_folder
from poly_epo_jax.system.json_files import Columns, Row, read_rows as read_json_rows

PLAN, ATTEMPTS, LOG, EVALUATION = "study.json", "attempts.jsonl", "log.txt", "evaluation"

ATTEMPT: Columns = {
    "run": str,  # TASK/METHOD-lrRATE-seedSEED
    "stage": str,  # "train" or "evaluate"
    "started": str,  # start time in ISO 8601 format
    "seconds": int | float,
    "exit": int,  # exit code of the process, or 128 plus the number of the signal that terminated it
    "error": str,  # last line of the log or the name of a signal if the process failed or was stopped, otherwise empty
}


@dataclasses.dataclass(frozen=True)
class RunKey:
    """Identifies a run of a study.

    Attributes:
      task: Name of the task.
      method: Name of the method.
      rate: Learning rate.
      seed: Seed.
    """

    task: str
    method: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Name of the run folder, inside the folder of the task."""
        return f"{self.method}-lr{self.rate:g}-seed{self.seed}"

    @property
    def path(self) -> str:
        """Path of the run folder, relative to the folder of the study."""
        return f"{self.task}/{self.name}"

    @property
    def label(self) -> str:
        """Label of the run in evaluations, which contain runs of several tasks."""
        return f"{self.task}-{self.name}"

    @staticmethod
    def is_label(text: str) -> bool:
        """Returns True if the text has the form of the label of a run."""
        return re.search(r"-lr[0-9.e+-]+-seed[0-9]+$", text) is not None


@dataclasses.dataclass(frozen=True)
class RunState:
    """The progress of a run.

    Attributes:
      step: Last logged step. 0 if the run has not started.
      num_steps: Number of training steps. 0 if the run has not started.
      is_finished: Whether the run is finished, see `run_state`.
    """

    step: int = 0
    num_steps: int = 0
    is_finished: bool = False

    def __str__(self) -> str:
        return f"step {self.step} of {self.num_steps}" if self.num_steps else "not started"


def run_state(folder: Path) -> RunState:
    """Reads the progress of a run from its folder.

    A run is finished if its last step was logged, evaluated (unless evaluation is disabled) and saved. An emptied
    checkpoint folder counts as saved.
    """
    try:
        config = run_folder.read_config(folder)
        num_steps, evaluates = int(config["train"]["num_steps"]), bool(config["eval"]["every"])
    except (OSError, ValueError, KeyError, TypeError):
        return RunState()
    row = last_row(folder / run_folder.METRICS)
    step = row.get("step", 0)
    complete = step == num_steps and (not evaluates or any(map(is_held_out, row)))
    return RunState(step, num_steps, complete and (folder / run_folder.CHECKPOINTS / str(num_steps)).is_dir())


def clock(seconds: float) -> str:
    """Formats a duration as hours, minutes and seconds: 1:02:03."""
    return str(datetime.timedelta(seconds=round(seconds)))


def last_row(metrics: Path) -> Row:
    """Returns the last complete row of metrics.jsonl, or an empty dict. Reads at most the last 64 KiB of the file."""
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
    """Returns the rows of attempts.jsonl, oldest first.

    Raises:
      ValueError: If a row is corrupted.
    """
    return list(read_json_rows(folder / ATTEMPTS, ATTEMPT))
