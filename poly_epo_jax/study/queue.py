"""Runs side by side: each worker takes the next run as soon as its last one has ended.

A worker is a core of this machine, or the devices that its runs may see. Every run is a process of its own. The study
passes a signal on to all of them and waits until they end, so that each saves what it has trained.
"""

import asyncio
import dataclasses
import datetime
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from poly_epo_jax.records import run_folder
from poly_epo_jax.study.folder import ATTEMPTS, LOG
from poly_epo_jax.study.plan import StudyRun
from poly_epo_jax.system.file_lock import InUseError
from poly_epo_jax.system.json_files import Row, append_rows
from poly_epo_jax.system.signals import Stop, Stopped

Worker = dict[str, str]
"""Environment variables of the runs at a worker; `CORE` is the core that they are bound to."""

CORE = "core"
ENDED = (128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of runs that did not fail but were ended by a signal."""

POLL_INTERVAL_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Listener:
    """Called for every run: `started(run, stage)` and `ended(run, row of attempts.jsonl)`."""

    started: Callable[[StudyRun, str], None]
    ended: Callable[[StudyRun, Row], None]


def cores(count: int) -> list[Worker]:
    """`count` workers, each with a core of its own as long as there are enough; 0: one worker for each core.

    Every run has one core, however many run side by side, because a process's sums depend on its number of threads.
    """
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return [{CORE: str(mine[index % len(mine)])} for index in range(count or len(mine))]


def gpus(names: str) -> list[Worker]:
    """A worker for each of "0,1,2,3"; "0+1,2+3" are two workers of two GPUs each."""
    return [{"CUDA_VISIBLE_DEVICES": name.replace("+", ",")} for name in names.split(",")]


def default_workers(devices: Path = Path("/dev")) -> list[Worker]:
    """A worker for each GPU that JAX may see; else, with TPUs, one worker that has them all; else one for each core."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return cores(0)
    numbers = sorted(path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(numbers))
    if numbers and visible not in ("", "-1"):  # with which CUDA hides all
        return gpus(visible)
    return [{}] if any(devices.glob("accel[0-9]*")) or any(devices.glob("vfio/[0-9]*")) else cores(0)


async def run_all(folder: Path, runs: Sequence[StudyRun], workers: Sequence[Worker], listener: Listener) -> list[Row]:
    """Trains and evaluates what is not finished, and returns the rows that it has added to attempts.jsonl.

    A run that fails is reported, and the others continue.

    Raises:
      Stopped: a signal came; all runs under way have saved what they have trained, and ended.
    """
    stop, waiting, rows = Stop(), deque(runs), []

    async def take(worker: Worker) -> None:
        while waiting:
            run = waiting.popleft()
            trained = run.is_trained() or await succeeds(run, "train", run.train_command, worker)
            if trained and not run.is_evaluated():
                await succeeds(run, "evaluate", run.evaluate_command, worker)
            if trained and run.is_evaluated() and not run.keep_weights:
                run.drop_weights()

    async def succeeds(run: StudyRun, stage: str, command: Sequence[str], worker: Worker) -> bool:
        await stop.check()
        listener.started(run, stage)
        row = await _attempt(run, stage, command, worker, stop)
        append_rows(folder / ATTEMPTS, [row])
        rows.append(row)
        listener.ended(run, row)
        await stop.check()
        return not row["exit"]

    with stop.on_signals():
        ended = await asyncio.gather(*map(take, workers), return_exceptions=True)
    for error in ended:
        if isinstance(error, BaseException):
            raise error
    return rows


async def _attempt(run: StudyRun, stage: str, command: Sequence[str], worker: Worker, stop: Stop) -> Row:
    """Runs one process from start to end, however it ends."""
    started, clock = datetime.datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic()
    log = run.folder / LOG
    code, error = 1, ""
    try:
        await _until_free(run.folder, stop)
        code, last_line = await _process([sys.executable, "-m", *command], worker, log, stop)
        error = last_line if code else ""
    except Stopped as stopped:
        code, error = 128 + stopped.number, str(stopped)
    except OSError as failed:
        error = f"{log}: {failed.strerror or failed}"
    return {
        "run": run.key.path,
        "stage": stage,
        "started": started,
        "seconds": round(time.monotonic() - clock, 1),
        "exit": code,
        "error": error,
    }


async def _until_free(folder: Path, stop: Stop) -> None:
    """Waits while a run that a killed study has left behind is still training."""
    while True:
        try:
            with run_folder.in_use(folder):
                return
        except InUseError:
            await stop.interrupts(asyncio.sleep(POLL_INTERVAL_SECONDS))


async def _process(command: Sequence[str], worker: Worker, log: Path, stop: Stop) -> tuple[int, str]:
    """Runs a process and returns its exit code and last line; its output is appended to the log."""
    environment = os.environ | {name: value for name, value in worker.items() if name != CORE}
    bound = ["taskset", "-c", worker[CORE]] if CORE in worker and shutil.which("taskset") else []
    with log.open("ab") as output:
        before = output.tell()
        # In a session of its own: a terminal's Ctrl-C reaches only the study, which passes it on.
        process = await asyncio.create_subprocess_exec(
            *bound,
            *command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        code = await stop.interrupts(process.wait())
    except Stopped:
        process.send_signal(signal.SIGTERM)
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    if code < 0:
        return 128 - code, f"{signal.Signals(-code).name} ended it; the same command goes on from its last checkpoint"
    with log.open("rb") as file:
        file.seek(before)
        lines = file.read().decode(errors="replace").split("\n")
    last_line = next((line.strip() for line in reversed(lines) if line.strip()), f"it ended with exit code {code}")
    return code, last_line.removeprefix("Error: ")
