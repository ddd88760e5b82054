"""What a run leaves behind, and what it shows while it runs.

A run folder holds

    config.json      the run's whole config
    data.json        how many problems there are, and how many were left out and why
    metrics.jsonl    one row per step, {"step": 12, "reward": 0.61, ...}: numbers that follow from config and seed
                     alone, so an interrupted and resumed run leaves the same bytes as one that never was
    timing.jsonl     one row per step, {"step": 12, "seconds/generate": 3.2, "tokens_per_second": 5100.0, ...}: what
                     depends on the machine. seconds/STAGE: how long the stage of this step's batch was under way;
                     critical/STAGE: how long it was the only one, in this step; sync/share: of the step, for weights
    timeline.jsonl   one row per step, {"step": 3, "seconds": 4.1, "spans": [["generate", 0.0, 1.2, 3], ...], "start":
                     12.5}: what was under way from the row before on, `start` seconds after training began (or went
                     on), for `seconds`. A span is a stage, its start and end in that time, and the step whose batch it
                     is for: the next one's, where that is generated ahead, or the last one's, which is checkpointed
    samples.jsonl    one row per logged generation: {"step", "problem", "prompt", "generation", "response", "reward",
                     "cluster", "rationale", "advantage"}; cluster and advantage are null where the prompt had no
                     clustering, rationale is what the judge gave as its reason, if it gives any
    tensorboard/     metrics and timing as TensorBoard events
    checkpoints/     see checkpoint.py
    report/          see report.py

A row puts its step first and the other keys in alphabetical order; floats are written in full, and null stands for a
number that is not finite, since JSON has no NaN (TensorBoard keeps it). A row counts once its line is complete.
"""

import contextlib
import datetime
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from poly_epo_jax.types import Metrics

METRICS, TIMING, TIMELINE, SAMPLES = "metrics.jsonl", "timing.jsonl", "timeline.jsonl", "samples.jsonl"

_TRAINING_SHOWN = {
    "reward": "reward",
    "solved": "solved",
    "clusters/correct": "correct clusters",
    "clusters/incorrect": "incorrect clusters",
    "synergy": "synergy",
    "policy/entropy": "entropy",
    "policy/clip_fraction": "clip share",
}
_HELD_OUT_SHOWN = {"eval/reward": "reward", "eval/solved": "solved", "eval/correct_clusters@8": "correct clusters"}
_SECONDS_BETWEEN_LINES = 10.0


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a .jsonl file of a run; none if it does not exist (yet).

    Raises:
      ValueError: a complete line is not a row.
    """
    return [row for _, row in _lines_and_rows(path)]


class Tracker:
    """Writes a run folder and shows the run's progress.

    Opening it takes back whatever a killed run wrote after the checkpoint that is being resumed, so that the steps
    which run again are not recorded twice.

    Args:
      run_dir: the run folder, made if missing.
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
        self, run_dir: Path, config_json: str, total_steps: int, resume_step: int, wandb_project: str = ""
    ) -> None:
        self._run_dir = run_dir
        self._wandb: Any = _open_wandb(run_dir, config_json, wandb_project) if wandb_project else None
        with _explain_os_error(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            _replace(run_dir / "config.json", [config_json.encode()])
            for name in (METRICS, TIMING, TIMELINE, SAMPLES):
                rows = _lines_and_rows(run_dir / name)
                _replace(run_dir / name, (line for line, row in rows if row["step"] <= resume_step))
            # Not SummaryWriter: it writes from a thread, which a full disk ends, and then its queue blocks the caller.
            (run_dir / "tensorboard").mkdir(exist_ok=True)
            self._events = EventsWriter(str(run_dir / "tensorboard" / "events"))
            # A session start makes TensorBoard forget the events from this step on.
            self._write_event(Event(step=resume_step + 1, session_log=SessionLog(status=SessionLog.START)))
        self._display = _Display(total_steps, max(resume_step, 0))

    def log(self, step: int, metrics: Metrics, timing: Metrics) -> None:
        """Records one finished step. `metrics` must not depend on the machine; what does belongs in `timing`."""
        self._append(METRICS, [{"step": step, **metrics}])
        self._append(TIMING, [{"step": step, **timing}])
        values = [Summary.Value(tag=name, simple_value=value) for name, value in {**metrics, **timing}.items()]
        with _explain_os_error(self._run_dir):
            self._write_event(Event(step=step, summary=Summary(value=values)))
        if self._wandb is not None:
            self._wandb.log({**metrics, **timing}, step=step)
        self._display.show(step, metrics, timing)

    def log_timeline(self, step: int, row: Mapping[str, Any]) -> None:
        """Records what was under way during this step: a row of timeline.jsonl, less the step."""
        self._append(TIMELINE, [{"step": step, **row}])

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Records generations of this step, one row each; the keys are those of samples.jsonl, less the step."""
        self._append(SAMPLES, [{"step": step, **row} for row in rows])

    def close(self) -> None:
        self._display.close()
        if self._wandb is not None:
            self._wandb.finish()
        with _explain_os_error(self._run_dir):
            self._events.close()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        with _explain_os_error(self._run_dir), (self._run_dir / name).open("ab") as file:
            file.writelines(_to_line(row) for row in rows)

    def _write_event(self, event: Event) -> None:
        event.wall_time = time.time()
        self._events.write_event(event)
        self._events.flush()


class NoTracker:
    """In the place of a Tracker, on the hosts that do not log."""

    def log(self, step: int, metrics: Metrics, timing: Metrics) -> None: ...

    def log_timeline(self, step: int, row: Mapping[str, Any]) -> None: ...

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...


def _to_line(row: Mapping[str, Any]) -> bytes:
    plain = {key: value.item() if hasattr(value, "item") else value for key, value in row.items()}  # numpy scalars
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in plain.items()
    }
    ordered = {"step": finite.pop("step")} | dict(sorted(finite.items()))
    return json.dumps(ordered, allow_nan=False).encode() + b"\n"


def _lines_and_rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
                _ = row["step"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}, is not a row of a run: mend or delete that line.") from error
            yield line, row


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextlib.contextmanager
def _explain_os_error(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            error.errno, f"cannot write to the run folder {run_dir} ({reason}): make room or choose a writable folder."
        ) from error


def _open_wandb(run_dir: Path, config_json: str, project: str) -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"wandb_project is {project!r} but wandb is not installed: install wandb or leave wandb_project empty."
        ) from error
    # The id makes a resumed run go on in the same place.
    name = run_dir.name
    return wandb.init(project=project, name=name, id=name, resume="allow", config=json.loads(config_json))


class _Display:
    """A live screen on a terminal; elsewhere a line for the first step, the last, each evaluation, and every 10 s."""

    def __init__(self, total_steps: int, first_step: int) -> None:
        self._total_steps = total_steps
        self._latest: Metrics = {}
        self._evaluated_at: int | None = None
        self._next_line_at = -math.inf
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            expand=True,
            speed_estimate_period=3600.0,  # the default forgets steps of more than 30 s
        )
        self._task = self._progress.add_task("", total=total_steps, completed=first_step)
        console = Console()
        self._live = Live(self._screen(), console=console, refresh_per_second=2) if console.is_terminal else None
        if self._live is not None:
            self._live.start()

    def show(self, step: int, metrics: Metrics, timing: Metrics) -> None:
        self._latest |= metrics | timing
        evaluated = any(name in metrics for name in _HELD_OUT_SHOWN)
        if evaluated:
            self._evaluated_at = step
        self._progress.update(self._task, completed=step)
        if self._live is not None:
            self._live.update(self._screen())
        elif evaluated or step == self._total_steps or time.monotonic() >= self._next_line_at:
            self._next_line_at = time.monotonic() + _SECONDS_BETWEEN_LINES
            print(self._line(step, metrics, timing), flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _screen(self) -> Group:
        stages = {name: name.removeprefix("seconds/") for name in self._latest if name.startswith("seconds/")}
        evaluated = "" if self._evaluated_at is None else f" (step {self._evaluated_at})"
        blocks = [
            _block("training", self._latest, _TRAINING_SHOWN),
            _block(f"held out{evaluated}", self._latest, _HELD_OUT_SHOWN),
            _block("seconds", self._latest, stages | {"sync/share": "sync share", "tokens_per_second": "tokens/s"}),
        ]
        return Group(self._progress, Columns(blocks, padding=(1, 2)))

    def _line(self, step: int, metrics: Metrics, timing: Metrics) -> str:
        parts = [f"step {step}/{self._total_steps}"]
        labels = _TRAINING_SHOWN | {name: f"held-out {label}" for name, label in _HELD_OUT_SHOWN.items()}
        parts += [f"{label} {_number(metrics[name])}" for name, label in labels.items() if name in metrics]
        units = {"tokens_per_second": "tokens/s", "seconds/step": "s"}
        parts += [f"{_number(timing[name])} {unit}" for name, unit in units.items() if name in timing]
        left = self._progress.tasks[0].time_remaining
        if left:
            parts.append(f"{datetime.timedelta(seconds=int(left))} left")
        return "  ".join(parts)


def _block(title: str, values: Metrics, labels: Mapping[str, str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(title, header_style="bold")
    table.add_column(justify="right", min_width=6)
    for name, label in labels.items():
        table.add_row(label, _number(values[name]) if name in values else "-")
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}"
