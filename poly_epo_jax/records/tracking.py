"""Writes the records of a training run: its run folder (see run_folder.py), TensorBoard and Weights & Biases."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from poly_epo_jax.records import run_folder
from poly_epo_jax.records.progress import TrainingProgress
from poly_epo_jax.system.json_files import append_rows, replace_file
from poly_epo_jax.types import Metrics

WANDB_COLUMNS = ("prompt", "response", "reward", "cluster", "advantage")
"""The columns of the table of a step's generations in Weights & Biases."""


class Tracker(AbstractContextManager["Tracker"]):
    """Writes a run folder and shows the run's progress.

    Opening it removes whatever a killed run wrote after the checkpoint that is being resumed, so that steps which run
    again are not recorded twice.

    Args:
      folder: the run folder, created if missing.
      config_json: the whole config, written to config.json as it is.
      total_steps: the step at which training ends.
      resume_step: the restored checkpoint's step: rows up to and including it stay. -1 for a fresh start: none stay.
      wandb_project: also log to this Weights & Biases project; empty: do not.

    Raises:
      OSError: the run folder cannot be written, e.g. the disk is full; every `log...` raises it too.
      ValueError: a row of an earlier run is damaged.
      ImportError: `wandb_project` is given and wandb is not installed.
    """

    def __init__(
        self, folder: Path, config_json: str, total_steps: int, resume_step: int, wandb_project: str = ""
    ) -> None:
        self._folder = folder
        self._wandb: Any = _open_wandb(folder, config_json, wandb_project) if wandb_project else None
        with run_folder.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / run_folder.CONFIG, [config_json.encode()])
            run_folder.drop_rows_after(folder, resume_step)
            # Not SummaryWriter: it writes from a thread; a full disk ends that thread, and its queue blocks the caller.
            (folder / run_folder.TENSORBOARD).mkdir(exist_ok=True)
            self._events = EventsWriter(str(folder / run_folder.TENSORBOARD / "events"))
            # A session start makes TensorBoard forget the events from this step on.
            self._write_event(Event(step=resume_step + 1, session_log=SessionLog(status=SessionLog.START)))
        self._progress = TrainingProgress(total_steps, max(resume_step, 0))
        self._hidden: Metrics = {}  # logged since the last `show`

    def log(self, step: int, metrics: Metrics) -> None:
        """Writes a row of metrics.jsonl: the metrics of a trained step, or of an evaluation after it.

        Args:
          step: Number of steps after which the metrics were measured.
          metrics: Values that do not depend on the machine. Values that do are written by `log_timing`.
        """
        self._append(run_folder.METRICS, [{"step": step, **metrics}])
        self._log_scalars(step, metrics)

    def log_timing(self, step: int, timing: Metrics, window: Mapping[str, Any]) -> None:
        """Writes a row of timing.jsonl and a row of timeline.jsonl.

        Args:
          step: The step.
          timing: Values that depend on the machine.
          window: Stages that were in progress during the step, as returned by `Window.row`.
        """
        self._append(run_folder.TIMING, [{"step": step, **timing}])
        self._append(run_folder.TIMELINE, [{"step": step, **window}])
        self._log_scalars(step, timing)

    def show(self, step: int) -> None:
        """Shows everything that has been logged since the last call."""
        self._progress.show(step, self._hidden)
        self._hidden = {}

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes generations of a step, one row each, with the columns of `LOGGED_GENERATION` except the step."""
        self._append(run_folder.GENERATIONS, [{"step": step, **row} for row in rows])
        if self._wandb is not None and rows:
            self._wandb.log({"generations": _wandb_table(rows)}, step=step)

    def close(self) -> None:
        self._progress.close()
        if self._wandb is not None:
            self._wandb.finish()
        with run_folder.writing(self._folder):
            self._events.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log_scalars(self, step: int, values: Metrics) -> None:
        self._hidden |= values
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        with run_folder.writing(self._folder):
            self._write_event(Event(step=step, summary=Summary(value=scalars)))
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        with run_folder.writing(self._folder):
            append_rows(self._folder / name, rows)

    def _write_event(self, event: Event) -> None:
        event.wall_time = time.time()
        self._events.write_event(event)
        self._events.flush()


def _wandb_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    import wandb  # pyright: ignore[reportMissingImports]

    return wandb.Table(columns=list(WANDB_COLUMNS), data=[[row[name] for name in WANDB_COLUMNS] for row in rows])


def _open_wandb(folder: Path, config_json: str, project: str) -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"wandb_project is {project!r} but wandb is not installed: install wandb or leave wandb_project empty."
        ) from error
    # The id makes a resumed run continue in the same place.
    name = folder.name
    return wandb.init(project=project, name=name, id=name, resume="allow", config=json.loads(config_json))
