"""The configuration of configs/polynomial.py, for processes that wait at a named point until a test sends a signal.

A process waits at the point in the environment variable POLY_EPO_HALT_AT, such as "push 3", after it has created the
file POLY_EPO_HALTED. A signal therefore always reaches it in the same state, regardless of the speed of the machine. It
continues when its `StopSignal` is requested, or when the test calls `HaltPoint.resume`. If the file exists, no process
waits.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ml_collections import ConfigDict

from configs import polynomial
from poly_epo_jax.system.signals import StopSignal

FILE = Path(__file__)
SECONDS = 1200.0  # Timeout of waits. It is never reached in a test that passes.
AT, HALTED = "POLY_EPO_HALT_AT", "POLY_EPO_HALTED"


class Process(Protocol):
    """A process started with `subprocess.Popen` or with `ForkServer`."""

    def poll(self) -> int | None: ...


class HaltPoint:
    """Point at which processes started with `variables` wait.

    Args:
      file: File that the halted process creates. It must not exist.
      at: Name and number of the point, see `POINTS`.
    """

    def __init__(self, file: Path, at: str):
        self._file, self.variables = file, {AT: at, HALTED: str(file)}
        for one in (file, _resumed(file)):
            one.unlink(missing_ok=True)

    def wait(self, *processes: Process, log: Callable[[], str] = lambda: "") -> None:
        """Waits until a process is halted. All `processes` must keep running. `log` returns their output."""
        deadline = time.monotonic() + SECONDS
        while not self._file.exists():
            assert all(process.poll() is None for process in processes), log()
            assert time.monotonic() < deadline, f"no process has reached {self.variables[AT]}\n{log()}"
            time.sleep(0.01)

    def resume(self) -> None:
        """Makes the halted process continue without a signal."""
        _resumed(self._file).touch()


def get_config(recipe: str = "poly_epo") -> ConfigDict:
    install()
    return polynomial.get_config(recipe)


def install() -> None:
    """Makes this process wait at the point in POLY_EPO_HALT_AT, if it reaches the point."""
    if AT in os.environ:
        name, number = os.environ[AT].split()
        POINTS[name](int(number))


def _resumed(file: Path) -> Path:
    return file.with_name(f"{file.name}.resumed")


def _halt() -> None:
    file, requested, request = Path(os.environ[HALTED]), threading.Event(), StopSignal.request

    def record(self: StopSignal, number: int, reason: str = "") -> None:
        request(self, number, reason)
        requested.set()

    StopSignal.request = record
    with contextlib.suppress(FileExistsError):
        file.touch(exist_ok=False)
        deadline = time.monotonic() + SECONDS
        # A signal that arrives just before `wait` does not interrupt it.
        while not requested.wait(0.05) and not _resumed(file).exists():
            if time.monotonic() > deadline:  # The test has ended without a signal.
                os._exit(1)


def _before_push(step: int) -> None:
    """Halts after the metrics of a step were written, before its weights are pushed."""
    from poly_epo_jax.train import Trainer

    push = Trainer.push_weights

    async def push_weights(self: Trainer) -> None:
        if self.progress is not None and self.progress.step == step:
            _halt()
        await push(self)

    Trainer.push_weights = push_weights


def _in_update(step: int) -> None:
    """Halts the thread that computes the update of a step, while the event loop continues."""
    from poly_epo_jax.step.update import PolicyUpdate
    from poly_epo_jax.train import Trainer

    train, update, current = Trainer.step, PolicyUpdate.__call__, [0]

    async def train_step(self: Trainer, number: int) -> Any:
        current[0] = number
        return await train(self, number)

    def halted_update(*arguments: Any) -> Any:
        if current[0] == step:
            _halt()
        return update(*arguments)

    for owner, name, function in ((Trainer, "step", train_step), (PolicyUpdate, "__call__", halted_update)):
        setattr(owner, name, function)


def _before_commit(step: int) -> None:
    """Halts after the files of a checkpoint were written, before their folder is renamed to that of the checkpoint."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and Path(os.fsdecode(arguments[1])).parts[-2:] == ("checkpoints", str(step)):
            _halt()

    sys.addaudithook(hook)


def _before_deletion(step: int) -> None:
    """Halts after a checkpoint was saved, before that of another step is deleted."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "shutil.rmtree" and Path(os.fsdecode(arguments[0])).parts[-2:] == ("checkpoints", str(step)):
            _halt()

    sys.addaudithook(hook)


def _after_problems(count: int) -> None:
    """Halts an evaluation that has written the generations of this number of problems."""
    from poly_epo_jax.evaluate import draw

    append, written = draw.append_rows, [0]

    def append_rows(*arguments: Any) -> None:
        append(*arguments)
        written[0] += 1
        if written[0] == count:
            _halt()

    draw.append_rows = append_rows


POINTS: dict[str, Callable[[int], None]] = {
    "push": _before_push,
    "update": _in_update,
    "commit": _before_commit,
    "deletion": _before_deletion,
    "problems": _after_problems,
}
