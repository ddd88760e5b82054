"""Writes the records of a training run to its run folder (see run_folder.py), TensorBoard, W&B and Trackio."""

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from poly_epo_jax.records import run_folder
from poly_epo_jax.records.progress import TrainingProgress
from poly_epo_jax.records.timeline import Timeline
from poly_epo_jax.system.json_files import append_rows, replace_file
from poly_epo_jax.system.repeated_warnings import warn_repeatedly
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
      projects: Projects to log to, by the module `wandb` or `trackio`.
      method: Name of the method, for the progress display.

    Raises:
      OSError: If the run folder cannot be written, for example because the disk is full. All methods raise this error.
      ValueError: If a row of the run folder is corrupted.
      ImportError: If `projects` selects a module that is not installed.
    """

    def __init__(
        self,
        folder: Path,
        config_json: str,
        total_steps: int,
        resume_step: int,
        projects: Mapping[str, str] = MappingProxyType({}),
        method: str = "",
    ) -> None:
        self._folder = folder
        self._loggers = {
            module: _open_logger(module, folder, config_json, project) for module, project in projects.items()
        }
        with run_folder.writing(folder):
            replace_file(folder / run_folder.CONFIG, [config_json.encode()])
            run_folder.drop_rows_after(folder, resume_step)
            # SummaryWriter writes in a thread. A full disk would end it, and its queue would then block the caller.
            (folder / run_folder.TENSORBOARD).mkdir(exist_ok=True)
            self._events = EventsWriter(str(folder / run_folder.TENSORBOARD / "events"))
            # A session start makes TensorBoard discard earlier events from this step onwards.
            self._write_event(Event(step=resume_step + 1, session_log=SessionLog(status=SessionLog.START)))
        title = f"{folder}: {method}" if method else str(folder)
        self._progress = TrainingProgress(total_steps, max(resume_step, 0), title)
        self._unpublished: Metrics = {}
        self._tables: dict[str, Any] = {}

    def show_stages(self, timeline: Timeline) -> None:
        """Makes the progress display show the stages of `timeline` that are in progress."""
        self._progress.active_stages = timeline.active

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
        if "wandb" in self._loggers and rows:
            import wandb  # pyright: ignore[reportMissingImports]

            self._tables = {
                "generations": wandb.Table(
                    columns=list(WANDB_COLUMNS), data=[[row[name] for name in WANDB_COLUMNS] for row in rows]
                )
            }

    def publish(self, step: int) -> None:
        """Sends everything that was logged since the last call to TensorBoard, the loggers and the progress display.

        The rows of the run folder are written before, so that an error here does not lose them. A logger that raises an
        exception does not end the run.
        """
        values, self._unpublished = self._unpublished, {}
        tables, self._tables = self._tables, {}
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        with run_folder.writing(self._folder):
            self._write_event(Event(step=step, summary=Summary(value=scalars)))
        for module, logger in self._loggers.items():
            try:
                logger.log({**values, **(tables if module == "wandb" else {})}, step=step)
            except Exception as error:  # such as a network error, which must not end the run
                warn_repeatedly(
                    f"{module} of {self._folder}",
                    f"{module} did not accept step {step}: {type(error).__name__}: {error}. The run continues; "
                    f"{self._folder} contains all rows.",
                )
        self._progress.show(step, values)

    def close(self) -> None:
        """Closes the progress display, the loggers and the TensorBoard file."""
        self._progress.close()
        for module, logger in self._loggers.items():
            try:
                logger.finish()
            except Exception as error:
                print(f"Warning: {module} did not finish: {type(error).__name__}: {error}.", file=sys.stderr)
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


def check_loggers(projects: Mapping[str, str]) -> None:
    """Raises ImportError if a module of the loggers, by which the projects are listed, is not installed."""
    for module, project in projects.items():
        _logger_init(module, project)


def _logger_init(module: str, project: str) -> Any:
    """Returns the function `init` of W&B or Trackio."""
    try:
        # `import wandb` alone would succeed if the current folder contains a folder wandb/.
        if module == "wandb":
            from wandb import init  # pyright: ignore[reportMissingImports]
        else:
            from trackio import init  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"log.{module}_project={project!r}, but {module} is not installed; install {module} or leave the key empty."
        ) from error
    return init


def _open_logger(module: str, folder: Path, config_json: str, project: str) -> Any:
    """Starts the run of W&B or Trackio, or continues it if the training run is resumed.

    Runs are identified by a digest of the complete path of the run folder, because the runs of a study, and of two
    studies, may have folders with the same name.
    """
    digest, config = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16], json.loads(config_json)
    # Trackio identifies runs by their names.
    names = {"name": folder.name, "id": digest} if module == "wandb" else {"name": f"{folder.name}-{digest[:8]}"}
    return _logger_init(module, project)(project=project, resume="allow", config=config, **names)
