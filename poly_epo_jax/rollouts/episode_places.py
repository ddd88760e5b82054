"""Places where the calls of episodes run: an event loop in a thread of the trainer, or a worker process."""

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from poly_epo_jax.rollouts.episode_worker import Episodes
from poly_epo_jax.system.daemon_thread import abandon, in_daemon_thread
from poly_epo_jax.system.repeated_warnings import warn_repeatedly
from poly_epo_jax.tasks.verifier import START_SECONDS, worker_environment
from poly_epo_jax.types import Interactive

WORKER = Path(__file__).with_name("episode_worker.py")
BEAT_SECONDS = 0.1
"""Interval in seconds at which the event loop shows that it is not blocked."""
BLOCKED_SECONDS = 1.0
"""Time in seconds after which a call that blocks the event loop is reported."""
INTERRUPTED = "interrupted"
"""Kind of the result of a call whose event loop another episode blocked, or whose worker another episode ended."""


class CallResult(NamedTuple):
    """The result of a call of an episode.

    Attributes:
      kind: "" for a returned value, or the kind of the failure, see `types.EnvironmentFailure`.
      value: The returned value, or a description of the failure.
      traceback_file: File of the traceback of a failure, or an empty string.
      seconds: Time in seconds that the call took, without waiting for calls of other episodes.
    """

    kind: str
    value: Any
    traceback_file: str = ""
    seconds: float = 0.0


class _Call:
    """A call in the event loop of an `EpisodeLoop`.

    Attributes:
      task: asyncio task of the call, after it has begun.
      began: Time of the loop, without the time during which it was blocked, when the call began.
      seconds: Time in seconds that the call took. None until it has ended.
    """

    task: asyncio.Task[Any] | None = None
    began = 0.0
    seconds: float | None = None


class EpisodeLoop:
    """An event loop in a daemon thread, in which the calls of all episodes run.

    A call that blocks the loop is reported. If it exceeds its time limit, the loop is abandoned, because threads cannot
    be stopped: the other episodes of the loop are interrupted, and later episodes run in a new loop.

    Args:
      task: Starts the episodes.
    """

    def __init__(self, task: Interactive):
        self.is_alive, self.is_shared, self.num_episodes = True, True, 0
        self._episodes, self._loop = Episodes(task), asyncio.new_event_loop()
        self._num_running, self._next_beat, self._last_beat, self._clock = 0, None, 0.0, 0.0
        self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._thread.start()

    async def call(self, name: str, message: tuple[Any, ...], seconds: float) -> CallResult:
        """Calls a method of an episode.

        The time limit does not include the time during which other calls block the loop.

        Args:
          name: Name of the call, for messages.
          message: Arguments of `Episodes.call`.
          seconds: Time limit of the call.
        """
        call, is_reported = _Call(), False
        running = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._run(call, message), self._loop))
        try:
            while self.is_alive:
                await asyncio.wait(
                    [running], timeout=max(BEAT_SECONDS, min(BLOCKED_SECONDS, seconds - self._seconds(call)))
                )
                if running.done():
                    return CallResult(*running.result(), self._seconds(call))
                is_blocking = self._is_blocked_by(call)
                if is_blocking and not is_reported:
                    is_reported = True
                    warn_repeatedly(
                        "blocked loop",
                        f"{name} blocks the event loop of the environments, so all other episodes wait; set "
                        "rollouts.environment_workers, or run the call in a thread.",
                    )
                if call.seconds is None and self._seconds(call) >= seconds:
                    if is_blocking:
                        self.is_alive = False
                        abandon(self._thread, self._loop)
                    return CallResult("late", "", seconds=seconds)
            return CallResult(INTERRUPTED, "was interrupted")
        finally:
            running.cancel()

    async def _run(self, call: _Call, message: tuple[Any, ...]) -> tuple[str, Any, str]:
        self._num_running += 1
        if self._next_beat is None:
            self._last_beat = time.monotonic()
            self._beat()
        call.task, call.began = asyncio.current_task(), self._clock
        result = await self._episodes.call(*message)
        call.seconds = self._clock - call.began
        self._num_running -= 1
        return result

    def _beat(self) -> None:
        """Adds the time since the last beat to the clock, unless the loop was blocked. Runs while there are calls."""
        now = time.monotonic()
        self._clock, self._last_beat = self._clock + min(now - self._last_beat, 2 * BEAT_SECONDS), now
        self._next_beat = self._loop.call_later(BEAT_SECONDS, self._beat) if self._num_running else None

    def _is_blocked_by(self, call: _Call) -> bool:
        return (
            call.task is not None
            and asyncio.current_task(self._loop) is call.task
            and time.monotonic() - self._last_beat >= BLOCKED_SECONDS
        )

    def _seconds(self, call: _Call) -> float:
        """Returns the time that a call has taken so far."""
        if call.seconds is not None or call.task is None:
            return call.seconds or 0.0
        return self._clock - call.began + (time.monotonic() - self._last_beat if self._is_blocked_by(call) else 0.0)


class EpisodeWorker:
    """A process with the state of its episodes, which runs one call at a time.

    Args:
      task: Pickled task and the files of its modules, from `pickled_task`.
      memory_bytes: Memory limit of the process.
    """

    def __init__(self, task: tuple[dict[str, str], bytes], memory_bytes: int):
        self.is_alive, self.is_shared, self.num_episodes = True, True, 0
        self._lock, self._is_ready = asyncio.Lock(), False
        self._connection, other = multiprocessing.Pipe()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(other.fileno()), str(memory_bytes)],
            stdin=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            env=worker_environment() | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            process_group=0,  # so that the worker does not receive Ctrl-C
        )
        other.close()
        # The process receives the task after its imports. Until then, a large task does not fit into the connection.
        threading.Thread(target=self._send, args=(task,), daemon=True).start()

    def _send(self, task: Any) -> None:
        with contextlib.suppress(OSError):  # The first call fails, too, and reports it.
            self._connection.send(task)

    async def call(self, name: str, message: tuple[Any, ...], seconds: float) -> CallResult:
        """Calls a method of an episode, see `EpisodeLoop.call`. The process is killed if the call does not return.

        Raises:
          ChildProcessError: If the process cannot start.
        """
        async with self._lock:
            try:
                return await in_daemon_thread(lambda: self._ask(message, seconds))
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Kills the process, which interrupts its episodes."""
        self.is_alive = False
        self._process.kill()
        self._process.wait()

    def _ask(self, message: tuple[Any, ...], seconds: float) -> CallResult:
        if not self.is_alive:
            return CallResult(INTERRUPTED, "was interrupted")
        if not self._is_ready:
            self._wait_until_ready()
        begin = time.monotonic()
        try:
            self._connection.send(message)
            if self._connection.poll(seconds):
                return CallResult(*self._connection.recv(), seconds=time.monotonic() - begin)
        except (EOFError, OSError):
            self.stop()
            return CallResult("lost", f"ended its worker process with exit code {self._process.returncode}")
        self.stop()
        return CallResult("late", "", seconds=seconds)

    def _wait_until_ready(self) -> None:
        flaw = f"no response within {START_SECONDS:.0f} s"
        with contextlib.suppress(EOFError, OSError):
            flaw = self._connection.recv() if self._connection.poll(START_SECONDS) else flaw
            self._is_ready = not flaw
        if not self._is_ready:
            raise ChildProcessError(
                f"Failed to start a worker of rollouts.environment_workers: {flaw}. Check that the worker can import "
                "the task's module, or set rollouts.environment_workers=0."
            )


def pickled_task(task: Interactive) -> tuple[dict[str, str], bytes]:
    """Returns the files of modules that cannot be imported by name but that the task needs, and the pickled task.

    Raises:
      ValueError: If the task cannot be pickled, or its class is defined in a script or notebook.
    """
    try:
        if type(task).__module__ == "__main__":
            raise TypeError("its class is defined in a script or notebook")
        pickled = pickle.dumps(task)
    except Exception as error:
        raise ValueError(
            f"rollouts.environment_workers requires a task that can be pickled, but {type(task).__name__} cannot: "
            f"{error}. Define its class in a module or in the file of --config, without open files or connections in "
            "its attributes, or set rollouts.environment_workers=0."
        ) from error
    unknown = {name: module for name, module in sys.modules.items() if getattr(module, "__spec__", name) is None}
    files = {name: getattr(module, "__file__", None) for name, module in unknown.items() if name != "__main__"}
    return {name: os.path.abspath(file) for name, file in files.items() if file and name.encode() in pickled}, pickled
