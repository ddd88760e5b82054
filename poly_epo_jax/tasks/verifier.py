"""Grades answers in worker processes with time and memory limits.

An answer that takes too long, needs too much memory or ends its process therefore cannot stall or crash the run. The
processes are not a sandbox: a grader that evaluates an answer as code runs it with the rights of the user.
"""

import collections
import contextlib
import enum
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from poly_epo_jax.system.limits import cpu_limit
from poly_epo_jax.tasks.answer_rules import comparable
from poly_epo_jax.tasks.answers import normalize_latex

WORKER = Path(__file__).with_name("worker.py")
START_SECONDS = 120.0
MAX_REPLY_BYTES = 2**20
# Number of remembered outcomes, which covers several training steps.
MAX_REMEMBERED = 16_384


class Grader(NamedTuple):
    """A script that workers execute to grade answers.

    Attributes:
      package: Distribution that the script requires.
      command: Path of the script, which defines `open_grader`, and the arguments of this function.
      returns: Type of the values that the grader returns, unless they are outcomes.
    """

    package: str
    command: tuple[str, ...]
    returns: type = float


MATH = Grader("math-verify", (str(Path(__file__).with_name("verify_worker.py")),))
"""Compares mathematical answers."""


def worker_environment() -> dict[str, str]:
    """Returns the environment variables of workers. Others, such as API keys, could be read by an answer."""
    inherited = "PATH|HOME|TMPDIR|TZ|LANG|LC_.*|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHON.*|NLTK_DATA|OMP_NUM_THREADS"
    return {name: value for name, value in os.environ.items() if re.fullmatch(inherited, name)}


class Outcome(enum.Enum):
    """Outcome of a comparison."""

    RIGHT = "right"
    WRONG = "wrong"
    TIMED_OUT = "timed out"
    CRASHED = "crashed"


class Verifier:
    """A thread-safe pool of worker processes that grade answers.

    Workers start at the first answer. A worker cancels a comparison after `cpu_seconds` of CPU time, and is killed
    by a signal after twice that time. A worker that terminates, or does not respond within 15 times `cpu_seconds` of
    wall-clock time, is replaced. Workers terminate when `close` is called, when the verifier is garbage-collected, or
    when this process terminates for any reason.

    Args:
      num_workers: Number of worker processes. 0 starts one for every two CPU cores that this process may
        use, but at least 2.
      cpu_seconds: CPU time limit of one comparison, in seconds.
      memory_gb: Memory limit of each worker, in GiB. It is only enforced on Linux.
      grader: Grades the answers.
    """

    def __init__(self, num_workers: int = 0, cpu_seconds: float = 2.0, memory_gb: float = 4.0, grader: Grader = MATH):
        self._num_workers = num_workers or max(2, cpu_limit() // 2)
        # On a busy machine, wall-clock time is much longer than CPU time.
        self._deadline_seconds = 15 * cpu_seconds
        limits = (str(int(memory_gb * 2**30)), str(cpu_seconds))
        # -P removes the script's folder from the import path, where math.py would shadow the standard library module.
        command = (sys.executable, "-P", str(WORKER), *limits, *grader.command)
        self._grader = grader._replace(command=command)
        self._workers: list[_Worker] = []
        self._idle: queue.Queue[_Worker] = queue.Queue()
        self._lock = threading.Lock()
        self._counts: collections.Counter[Outcome] = collections.Counter()
        self._known: dict[tuple[str, ...], Outcome] = {}  # by request, in the order of their last use
        self._close = weakref.finalize(self, _stop_all, self._workers)

    def compare(self, gold: str, answer: str) -> Outcome:
        """Compares an answer with the gold answer. Blocks until a worker is free.

        Answers with the same normalized text are equal. Otherwise the rules of `answer_rules` are applied, and a worker
        compares the answers. An answer that cannot be read within the time limit is only tried once.

        Args:
          gold: Gold answer in LaTeX.
          answer: Answer of a response in LaTeX.

        Returns:
          The outcome of the comparison.

        Raises:
          ChildProcessError: If a worker cannot start.
          ValueError: If the verifier is closed.
        """
        outcome = self._compare(normalize_latex(gold), normalize_latex(answer))
        with self._lock:
            self._counts[outcome] += 1
        return outcome

    def call(self, *request: str) -> Any:
        """Calls the grader in a worker. Blocks until a worker is free.

        Args:
          request: Arguments of the grader.

        Returns:
          The value that the grader returned, or the outcome if it raised an exception, exceeded its time limit or
          crashed.

        Raises:
          ChildProcessError: If a worker cannot start.
          ValueError: If the verifier is closed.
        """
        with self._free_worker() as worker:
            reply = worker.ask(request, self._deadline_seconds)
        if isinstance(reply, Outcome):
            with self._lock:
                self._counts[reply] += 1
        return reply

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of answers since the last call that timed out or crashed a worker."""
        counts = self.take_counts()
        return {
            "grader/timeouts": float(counts[Outcome.TIMED_OUT]),
            "grader/crashes": float(counts[Outcome.CRASHED]),
        }

    def _compare(self, gold: str, answer: str) -> Outcome:
        pair = (gold, answer) if gold == answer else comparable(gold, answer)
        if pair is None or not all(pair):
            return Outcome.WRONG
        if pair[0] == pair[1]:
            return Outcome.RIGHT
        outcome = self._known.get(pair)
        if outcome is None:
            with self._free_worker() as worker:
                for request in (pair[:1], pair[1:], pair):
                    outcome = self._known.get(request) or worker.ask(request, self._deadline_seconds)
                    self._remember(request, outcome)
                    if outcome is not Outcome.RIGHT:
                        break
        assert outcome
        self._remember(pair, outcome)
        return outcome

    def _remember(self, request: tuple[str, ...], outcome: Outcome) -> None:
        with self._lock:
            self._known.pop(request, None)
            self._known[request] = outcome
            if len(self._known) > MAX_REMEMBERED:
                del self._known[next(iter(self._known))]

    def take_counts(self) -> dict[Outcome, int]:
        """Returns the number of comparisons with each outcome since the last call, and resets the counters."""
        with self._lock:
            taken, self._counts = self._counts, collections.Counter()
        return {outcome: taken[outcome] for outcome in Outcome}

    def close(self) -> None:
        """Terminates the workers. No comparison may be in progress."""
        self._close()

    @contextlib.contextmanager
    def _free_worker(self) -> Iterator["_Worker"]:
        with self._lock:
            if not self._close.alive:
                raise ValueError("The verifier is closed; create a new one.")
            if not self._workers:
                self._workers += [_Worker(self._grader) for _ in range(self._num_workers)]
                for worker in self._workers:
                    self._idle.put(worker)
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)


class GradedInWorkers:
    """Base class of tasks whose responses are graded in worker processes."""

    _verifier: Verifier

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of answers since the last call that timed out or crashed a worker."""
        return self._verifier.metrics()

    def close(self) -> None:
        """Terminates the workers. They also terminate when the task is garbage-collected."""
        self._verifier.close()


class _Worker:
    """One worker process, used by one thread at a time."""

    def __init__(self, grader: Grader):
        self._grader = grader
        self._start()

    def _start(self) -> None:
        # In its own process group, the worker does not receive Ctrl-C. It exits when the parent closes its stdin.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._grader.command, stdin=pipe, stdout=pipe, env=worker_environment(), process_group=0
        )
        self._ready = False

    def ask(self, texts: tuple[str, ...], seconds: float) -> Any:
        """Returns the value or the outcome that the grader returned, or the outcome of a failure."""
        request = json.dumps(texts).encode() + b"\n"
        # Two attempts, because the worker may have terminated for a reason unrelated to this answer.
        for _ in range(2):
            reply = self._reply(request, seconds)
            if reply:
                with contextlib.suppress(ValueError):  # a grader that executes an answer may have written anything
                    content = json.loads(reply)
                    return content if isinstance(content, self._grader.returns) else Outcome(content)
            self.stop()
            overran = reply is None or self._process.returncode == -signal.SIGPROF
            self._start()
            if overran:
                return Outcome.TIMED_OUT
        return Outcome.CRASHED

    def _reply(self, request: bytes, seconds: float) -> bytes | None:
        """Returns the reply, None after a timeout, or an empty reply if the process has terminated."""
        if not self._ready:
            self._wait_until_ready()
        assert self._process.stdin
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
        except BrokenPipeError:
            return b""
        return self._read(seconds)

    def _wait_until_ready(self) -> None:
        reply = self._read(START_SECONDS)
        self._ready = reply == b'"ready"\n'
        if not self._ready:
            reason = (
                f"no response within {START_SECONDS:.0f} s" if reply is None else "it exited, see the message above"
            )
            self.stop()
            self._start()
            raise ChildProcessError(
                f"Failed to start a worker that grades answers: {reason}. Check that {self._grader.package} is "
                f"installed for {sys.executable}."
            )

    def _read(self, seconds: float) -> bytes | None:
        """Returns a line, None after a timeout, or an empty line if the process has terminated."""
        assert self._process.stdout
        replies, deadline, line = self._process.stdout.fileno(), time.monotonic() + seconds, b""
        while not line.endswith(b"\n") and len(line) < MAX_REPLY_BYTES:
            if not wait([replies], max(0.0, deadline - time.monotonic())):
                return None
            piece = os.read(replies, MAX_REPLY_BYTES)
            if not piece:
                return b""
            line += piece
        return line

    def stop(self) -> None:
        self._process.kill()
        # Leaving the block closes the pipes and waits for the process. Flushing unwritten data raises BrokenPipeError.
        with contextlib.suppress(BrokenPipeError), self._process:
            pass


def _stop_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()
