"""Compares mathematical answers in worker processes, so that a hostile answer costs seconds and never the run."""

import collections
import contextlib
import enum
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import wait
from pathlib import Path

WORKER = Path(__file__).with_name("verify_worker.py")
START_SECONDS = 120.0


class Outcome(enum.Enum):
    """How a comparison ended."""

    RIGHT = "right"
    WRONG = "wrong"
    TIMED_OUT = "timed out"
    CRASHED = "crashed"


class Verifier:
    """A pool of worker processes that runs math-verify; its methods may be called from any thread.

    Workers start with the first comparison. A worker gives up a comparison that takes `cpu_seconds` of CPU time, and
    dies if it has not given up after twice that time. A worker that dies, or does not answer in 15 times `cpu_seconds`,
    is replaced. Workers end with `close()`, with the verifier, or with this process, however that ends.
    """

    def __init__(self, num_workers: int = 0, cpu_seconds: float = 2.0, memory_gb: float = 4.0):
        """`num_workers` 0 means one for every two CPU cores, and at least 2."""
        self._num_workers = num_workers or max(2, (os.cpu_count() or 1) // 2)
        # On a busy machine, CPU time and wall-clock time are far apart.
        self._deadline_seconds = 15 * cpu_seconds
        limits = (str(int(memory_gb * 2**30)), str(cpu_seconds))
        # -P keeps the script's folder off the path, where our math.py would shadow the standard library's.
        self._command = [sys.executable, "-P", str(WORKER), *limits]
        self._workers: list[_Worker] = []
        self._idle: queue.Queue[_Worker] = queue.Queue()
        self._lock = threading.Lock()
        self._counts: collections.Counter[Outcome] = collections.Counter()
        self._close = weakref.finalize(self, _stop_all, self._workers)

    def compare(self, gold: str, answer: str) -> Outcome:
        """Whether `answer` equals `gold`, both LaTeX; waits for a free worker.

        Raises:
          ChildProcessError: a worker cannot start.
          ValueError: the verifier is closed.
        """
        self._start()
        worker = self._idle.get()
        try:
            outcome = worker.compare(gold, answer, self._deadline_seconds)
        finally:
            self._idle.put(worker)
        with self._lock:
            self._counts[outcome] += 1
        return outcome

    def take_counts(self) -> dict[Outcome, int]:
        """How many comparisons had each outcome since this was last called."""
        with self._lock:
            taken, self._counts = self._counts, collections.Counter()
        return {outcome: taken[outcome] for outcome in Outcome}

    def close(self) -> None:
        """Ends the workers; call it once nothing is being compared."""
        self._close()

    def _start(self) -> None:
        with self._lock:
            if not self._close.alive:
                raise ValueError("The verifier is closed; make a new one.")
            if not self._workers:
                self._workers += [_Worker(self._command) for _ in range(self._num_workers)]
                for worker in self._workers:
                    self._idle.put(worker)


class _Worker:
    """One process, used by one thread at a time."""

    def __init__(self, command: list[str]):
        self._command = command
        self._start()

    def _start(self) -> None:
        # A process group of its own: Ctrl-C is for the parent, whose end closes the worker's stdin.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, process_group=0)
        self._ready = False

    def compare(self, gold: str, answer: str, seconds: float) -> Outcome:
        request = json.dumps([gold, answer]).encode() + b"\n"
        # Twice, as a worker may have died of something other than this answer.
        for _ in range(2):
            reply = self._ask(request, seconds)
            if reply:
                return Outcome(json.loads(reply))
            self.stop()
            overran = reply is None or self._process.returncode == -signal.SIGPROF
            self._start()
            if overran:
                return Outcome.TIMED_OUT
        return Outcome.CRASHED

    def _ask(self, request: bytes, seconds: float) -> bytes | None:
        """The reply; None if there was none in time, empty if the process has died."""
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
            said = f"said nothing for {START_SECONDS:.0f} s" if reply is None else "ended, with the message above"
            self.stop()
            self._start()
            raise ChildProcessError(
                f"A worker that compares answers did not start: it {said}; see that math-verify is installed for "
                f"{sys.executable}."
            )

    def _read(self, seconds: float) -> bytes | None:
        assert self._process.stdout
        replies = self._process.stdout.fileno()
        # A reply is shorter than what a pipe transfers in one piece.
        return os.read(replies, 512) if wait([replies], seconds) else None

    def stop(self) -> None:
        self._process.kill()
        # Leaving the block closes the pipes and waits; data not yet written no longer has a reader.
        with contextlib.suppress(BrokenPipeError), self._process:
            pass


def _stop_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()
