"""Writes the records of a training run to its run folder (see run_folder.py), TensorBoard and Weights & Biases."""

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
"""Columns of the table of generations in Weights & Biases."""


class Tracker(AbstractContextManager["Tracker"]):
    """Writes a run folder and shows the progress of the run.

    The constructor removes the rows that a killed run wrote after the checkpoint from which it resumes. Repeated steps
    are therefore not recorded twice.

    Args:
      folder: The run folder. Created if it does not exist.
      config_json: Full configuration, written to config.json unchanged.
      total_steps: Last step of the run.
      resume_step: Step of the restored checkpoint. Later rows are removed. -1 starts a new run and removes all rows.
      wandb_project: Weights & Biases project to log to. Empty disables Weights & Biases.

    Raises:
      OSError: If the run folder cannot be written, for example because the disk is full. All methods raise this error.
      ValueError: If a row of the run folder is corrupted.
      ImportError: If `wandb_project` is set and wandb is not installed.
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
            # SummaryWriter writes in a thread. A full disk would end it, and its queue would then block the caller.
            (folder / run_folder.TENSORBOARD).mkdir(exist_ok=True)
            self._events = EventsWriter(str(folder / run_folder.TENSORBOARD / "events"))
            # A session start makes TensorBoard discard earlier events from this step onwards.
            self._write_event(Event(step=resume_step + 1, session_log=SessionLog(status=SessionLog.START)))
        self._progress = TrainingProgress(total_steps, max(resume_step, 0))
        self._unpublished: Metrics = {}
        self._tables: dict[str, Any] = {}

    def log(self, step: int, metrics: Metrics) -> None:
        """Writes a row of metrics.jsonl: the metrics of a trained step, or of an evaluation after it.

        Args:
          step: Number of steps after which the metrics were measured.
          metrics: Values that do not depend on the machine. `log_timing` writes the values that depend on it.
        """
        self._append(run_folder.METRICS, [{"step": step, **metrics}])
        self._unpublished |= metrics

    def log_timing(self, step: int, timing: Metrics, window: Mapping[str, Any]) -> None:
        """Writes a row of timing.jsonl and a row of timeline.jsonl.

        Args:
          step: The step.
          timing: Values that depend on the machine.
          window: Stages that were in progress during the step, as returned by `Window.row`.
        """
        self._append(run_folder.TIMING, [{"step": step, **timing}])
        self._append(run_folder.TIMELINE, [{"step": step, **window}])
        self._unpublished |= timing

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes rows of generations.jsonl.

        Args:
          step: Step of the generations.
          rows: One row per generation, with the columns of `LOGGED_GENERATION` except the step.
        """
        self._append(run_folder.GENERATIONS, [{"step": step, **row} for row in rows])
        if self._wandb is not None and rows:
            self._tables = {"generations": _wandb_table(rows)}

    def publish(self, step: int) -> None:
        """Sends everything that was logged since the last call to TensorBoard, W&B and the progress display.

        The rows of the run folder are written before, so that an error here does not lose them.
        """
        values, self._unpublished = self._unpublished, {}
        tables, self._tables = self._tables, {}
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        with run_folder.writing(self._folder):
            self._write_event(Event(step=step, summary=Summary(value=scalars)))
        if self._wandb is not None:
            self._wandb.log({**values, **tables}, step=step)
        self._progress.show(step, values)

    def close(self) -> None:
        """Closes the progress display, Weights & Biases and the TensorBoard file."""
        self._progress.close()
        if self._wandb is not None:
            self._wandb.finish()
        with run_folder.writing(self._folder):
            self._events.close()

    def __exit__(self, *_: object) -> None:
        self.close()

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
        # `import wandb` alone would succeed if the current folder contains a folder wandb/.
        from wandb import init  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"log.wandb_project={project!r}, but wandb is not installed; install wandb or leave the key empty."
        ) from error
    # With the same id, a resumed run continues the same Weights & Biases run.
    name = folder.name
    return init(project=project, name=name, id=name, resume="allow", config=json.loads(config_json))
