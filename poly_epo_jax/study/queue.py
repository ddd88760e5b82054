"""Executes the runs of a study in parallel: each worker starts the next run when its current run ends.

A worker is a core of this machine or a set of devices. Each run is a separate process. The study forwards SIGTERM,
SIGHUP and Ctrl-C to all runs as SIGTERM, and waits until they have saved their state and exited.
"""

import asyncio
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
from poly_epo_jax.system.limits import cpu_limit
from poly_epo_jax.system.signals import Stopped, StopSignal

Worker = dict[str, str]
"""Environment variables for the runs of a worker. The entry `CORE` is not a variable, but the core of the runs."""

CORE = "core"
ENDED = (128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of runs that were stopped by SIGTERM or Ctrl-C. The progress display does not count them as failures."""

POLL_INTERVAL_SECONDS = 1.0


def cores(count: int) -> list[Worker]:
    """Returns `count` workers with one core each. Workers share cores if there are too few.

    If `count` is 0, there is one worker per core that this process may use at the same time.

    Runs always use a single core, because floating-point sums depend on the number of threads of a process.
    """
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return [{CORE: str(mine[index % len(mine)])} for index in range(count or cpu_limit())]


def gpus(names: str) -> list[Worker]:
    """Returns a worker per GPU of a list such as "0,1,2,3". "0+1,2+3" are two workers with two GPUs each."""
    return [{"CUDA_VISIBLE_DEVICES": name.replace("+", ",")} for name in names.split(",")]


def default_workers(devices: Path = Path("/dev")) -> list[Worker]:
    """Returns one worker per GPU visible to JAX, a single worker with all TPU chips, or one worker per core.

    Args:
      devices: Folder of device files.
    """
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return cores(0)
    numbers = sorted(path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(numbers))
    if numbers and visible not in ("", "-1"):  # values with which CUDA hides all GPUs
        return gpus(visible)
    return [{}] if any(devices.glob("accel[0-9]*")) or any(devices.glob("vfio/[0-9]*")) else cores(0)


async def run_all(
    folder: Path,
    runs: Sequence[StudyRun],
    workers: Sequence[Worker],
    started: Callable[[StudyRun, str], None],
    ended: Callable[[StudyRun, Row], None],
) -> list[Row]:
    """Runs the unfinished training and evaluation processes of a study.

    If a process fails, the failure is reported and the other runs continue.

    Args:
      folder: Folder of the study.
      runs: All runs. Finished runs are skipped.
      workers: Workers that execute runs in parallel.
      started: Called as `started(run, stage)` when a process starts.
      ended: Called as `ended(run, row)` when a process has ended, with its row of attempts.jsonl.

    Returns:
      The rows that were appended to attempts.jsonl.

    Raises:
      Stopped: If a shutdown was requested. All active runs have saved their state and exited.
    """
    stop, waiting, rows = StopSignal(), deque(runs), []

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
        started(run, stage)
        row = await _attempt(run, stage, command, worker, stop)
        append_rows(folder / ATTEMPTS, [row])
        rows.append(row)
        ended(run, row)
        await stop.check()
        return not row["exit"]

    with stop.on_signals():
        errors = await asyncio.gather(*map(take, workers), return_exceptions=True)
    for error in errors:
        if isinstance(error, BaseException):
            raise error
    return rows


async def _attempt(run: StudyRun, stage: str, command: Sequence[str], worker: Worker, stop: StopSignal) -> Row:
    """Runs a process and returns its row of attempts.jsonl. Failures and stops are recorded in the row."""
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


async def _until_free(folder: Path, stop: StopSignal) -> None:
    """Waits until the run folder is unlocked: a process of a killed study may still be training in it."""
    while True:
        try:
            with run_folder.lock_run_folder(folder):
                return
        except InUseError:
            await stop.run_interruptible(asyncio.sleep(POLL_INTERVAL_SECONDS))


async def _process(command: Sequence[str], worker: Worker, log: Path, stop: StopSignal) -> tuple[int, str]:
    """Runs a process, appends its output to the log, and returns its exit code and the last line of its output."""
    environment = os.environ | {name: value for name, value in worker.items() if name != CORE}
    bound = ["taskset", "-c", worker[CORE]] if CORE in worker and shutil.which("taskset") else []
    with log.open("ab") as output:
        before = output.tell()
        # A new session, so that Ctrl-C in a terminal only reaches the study, which forwards it.
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
        code = await stop.run_interruptible(process.wait())
    except Stopped:
        process.send_signal(signal.SIGTERM)
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    if code < 0:
        return 128 - code, f"terminated by {signal.Signals(-code).name}; rerun the command to resume the run"
    with log.open("rb") as file:
        file.seek(before)
        lines = file.read().decode(errors="replace").split("\n")
    last_line = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")
    return code, last_line.removeprefix("Error: ")
