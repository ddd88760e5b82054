"""Tests of the verifier: worker processes that hang, exceed their memory or crash do not affect other answers."""

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hostile_answers import HOSTILE

from poly_epo_jax.tasks import verifier as module
from poly_epo_jax.tasks.grader import Grader
from poly_epo_jax.tasks.verifier import START_SECONDS, Outcome, Verifier

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory limits and /proc require Linux")

CPU_SECONDS = 60.0
"""CPU time limit of comparisons that always end. The limit of the wall-clock time is 15 times as long."""

HONEST = [(rf"\frac{{{i}}}{{{i + 1}}}", rf"\frac{{{2 * i + (i % 2)}}}{{{2 * i + 2}}}") for i in range(1, 201)]
"""Pairs that are equal if i is even."""

OBEDIENT = """
import os, sys
os.write(1, b'"ready"\\n')
for line in sys.stdin:
    if "slow" not in line and "deadly" not in line: os.write(1, b'"right"\\n')
    """
"""Source of a worker that reads and accepts all answers except two. Tests append its handling of these answers."""


def pids(pool: Verifier) -> list[int]:
    return [worker._process.pid for worker in pool._workers]


@pytest.fixture(scope="module")
def shared_pool():
    pool = Verifier(2)
    yield pool
    pool.close()


@pytest.fixture
def pool():
    pool = Verifier(1, cpu_seconds=CPU_SECONDS, memory_gb=1.0)
    yield pool
    pool.close()


@pytest.fixture
def fake_worker(tmp_path: Path, monkeypatch):
    """Returns a function that creates a pool whose workers run other source code."""

    def install(source: str) -> Verifier:
        (tmp_path / "worker.py").write_text(source)
        monkeypatch.setattr(module, "WORKER", tmp_path / "worker.py")
        return Verifier(2, CPU_SECONDS)

    return install


@pytest.fixture
def expire(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[list[float]]]:
    """Returns a context manager in which all replies of workers are late. It yields the timeouts in seconds."""

    @contextmanager
    def expired() -> Iterator[list[float]]:
        timeouts: list[float] = []

        def wait(_: Any, seconds: float) -> list[Any]:
            timeouts.append(seconds)
            return []

        with monkeypatch.context() as patch:
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
            patch.setattr(module, "wait", wait)
            yield timeouts

    return expired


def honest_outcomes(pool: Verifier, threads: int) -> list[bool]:
    with ThreadPoolExecutor(threads) as executor:
        outcomes = list(executor.map(lambda pair: pool.compare(*pair), HONEST))
    assert set(outcomes) == {Outcome.RIGHT, Outcome.WRONG}
    return [outcome is Outcome.RIGHT for outcome in outcomes]


def test_many_threads_share_a_pool(shared_pool: Verifier):
    shared_pool.take_counts()
    shared_pool.compare("1", "1")
    assert honest_outcomes(shared_pool, threads=16) == [i % 2 == 0 for i in range(1, 201)]
    counts = {Outcome.RIGHT: 101, Outcome.WRONG: 100, Outcome.TIMED_OUT: 0, Outcome.CRASHED: 0}
    assert shared_pool.take_counts() == counts
    assert set(shared_pool.take_counts().values()) == {0}


@pytest.mark.parametrize("answer", ["factorial", "lines", "JSON", "surrogate", "NUL", "backslashes"])
def test_malicious_answers_are_not_accepted(shared_pool: Verifier, answer: str):
    assert shared_pool.compare("5", HOSTILE[answer]) is not Outcome.RIGHT
    assert shared_pool.compare("5", "5") is Outcome.RIGHT


def test_malicious_gold_answers_do_not_crash_workers(shared_pool: Verifier):
    assert shared_pool.compare("(10^9)!", "5") is not Outcome.RIGHT
    assert shared_pool.compare("", "") is Outcome.WRONG


@pytest.mark.slow
def test_malicious_answers_do_not_affect_other_answers():
    pool, before = Verifier(2, cpu_seconds=1.0), cpu_seconds_of_children()
    with ThreadPoolExecutor(4) as executor:
        hostile = [executor.submit(pool.compare, "5", answer) for answer in HOSTILE.values()]
        assert honest_outcomes(pool, threads=4) == [i % 2 == 0 for i in range(1, 201)]
        outcomes = dict(zip(HOSTILE, (future.result() for future in hostile), strict=True))
    pool.close()
    seconds = cpu_seconds_of_children() - before
    print(f"{len(HONEST)} ordinary and {len(HOSTILE)} malicious comparisons took {seconds:.2f} s of CPU time")
    assert [name for name, outcome in outcomes.items() if outcome is Outcome.RIGHT] == []
    assert seconds < 5 * len(HOSTILE), "each malicious answer takes about 1 s"


def cpu_seconds_of_children() -> float:
    """Returns the CPU time of terminated child processes, which does not depend on the load of the machine."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_the_deadline_terminates_workers_that_use_no_cpu_time(fake_worker, expire):
    """The CPU timers of a worker that waits forever never fire."""
    pool = fake_worker(OBEDIENT + "if 'slow' in line: __import__('signal').pause()")
    assert [pool.compare("5", answer) for answer in ("5.0", "05")] == [Outcome.RIGHT] * 2  # Starts both workers.
    before = pids(pool)
    with expire() as timeouts, ThreadPoolExecutor(2) as executor:
        assert list(executor.map(pool.compare, "55", ("slow", "slower"))) == [Outcome.TIMED_OUT] * 2
    assert timeouts == [15 * CPU_SECONDS] * 2
    assert not set(before) & set(pids(pool))
    assert pool.compare("5", "5.00") is Outcome.RIGHT
    assert pool.take_counts()[Outcome.TIMED_OUT] == 2
    pool.close()


def test_comparisons_and_unreadable_answers_are_remembered(fake_worker, tmp_path: Path):
    log = tmp_path / "requests"
    source = OBEDIENT.replace(":\n    if", ":\n    log.write(line)\n    if", 1)
    slow = "if 'slow' in line: os.write(1, b'\"timed out\"\\n')"
    pool = fake_worker(f"log = open({str(log)!r}, 'a', buffering=1)\n{source}{slow}")
    assert [pool.compare("5", answer) for answer in ("05", "05")] == [Outcome.RIGHT] * 2
    assert [pool.compare(gold, "slow") for gold in ("5", "6", "7", "5")] == [Outcome.TIMED_OUT] * 4
    asked = [json.loads(line) for line in log.read_text().splitlines() if line]
    assert asked == [["5"], ["05"], ["5", "05"], [r"\text{slow}"], ["6"], ["7"]]
    assert pool.take_counts()[Outcome.TIMED_OUT] == 4
    pool.close()


def test_the_oldest_comparisons_are_forgotten(fake_worker, monkeypatch):
    monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
    pool = fake_worker(OBEDIENT)
    for answer in ("05", "005", "0005"):
        assert pool.compare("5", answer) is Outcome.RIGHT
    assert set(pool._known) == {("5",), ("0005",), ("5", "0005")}
    pool.close()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_is_replaced_and_its_answer_is_compared_again(pool: Verifier, sent: signal.Signals):
    assert pool.compare("5", "5.0") is Outcome.RIGHT
    (before,) = pids(pool)
    os.kill(before, sent)
    assert pool.compare("5", "5.00") is Outcome.RIGHT
    assert pids(pool) != [before]
    assert pool.take_counts()[Outcome.CRASHED] == 0


def test_a_stopped_worker_is_killed(pool: Verifier, expire):
    assert pool.compare("5", "5.0") is Outcome.RIGHT
    os.kill(pids(pool)[0], signal.SIGSTOP)
    with expire():
        assert pool.compare("5", "5.00") is Outcome.TIMED_OUT
    assert pool.compare("5", "5.000") is Outcome.RIGHT


def test_an_answer_that_kills_every_worker_is_a_crash(fake_worker):
    pool = fake_worker(OBEDIENT + "if 'deadly' in line: break")
    assert [pool.compare("5", answer) for answer in ("5.0", "deadly", "5.0", "deadly")] == [
        Outcome.RIGHT,
        Outcome.CRASHED,
    ] * 2
    assert pool.take_counts() == {
        Outcome.RIGHT: 2,
        Outcome.WRONG: 0,
        Outcome.TIMED_OUT: 0,
        Outcome.CRASHED: 2,
    }
    pool.close()


def test_a_worker_that_ran_out_of_cpu_time_is_a_timeout(fake_worker):
    pool = fake_worker(OBEDIENT + "if 'slow' in line: os.kill(os.getpid(), __import__('signal').SIGPROF)")
    assert [pool.compare("5", answer) for answer in ("slow", "5.0")] == [Outcome.TIMED_OUT, Outcome.RIGHT]
    pool.close()


def test_a_worker_that_cannot_start_raises_an_error(fake_worker, capfd):
    pool = fake_worker("import math_verify_that_is_missing")
    for _ in range(3):
        with pytest.raises(ChildProcessError, match=r"it exited.* math-verify is installed for"):
            pool.compare("5", "6")
    assert "No module named 'math_verify_that_is_missing'" in capfd.readouterr().err
    pool.close()


def test_a_worker_that_does_not_respond_at_startup_raises_an_error(fake_worker, monkeypatch):
    monkeypatch.setattr(module, "START_SECONDS", 0.3)
    pool = fake_worker("import time\ntime.sleep(60)")
    with pytest.raises(ChildProcessError, match="no response within 0 s"):
        pool.compare("5", "6")
    pool.close()
    assert START_SECONDS > 60, "imports take long on a busy machine"


@needs_linux
def test_memory_is_limited(pool: Verifier):
    pool.compare("5", "6")
    assert resource.prlimit(pids(pool)[0], resource.RLIMIT_AS)[0] == 2**30


@pytest.mark.slow
def test_closing_terminates_the_workers():
    pool = Verifier(2)
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.compare("5", "6")
    for end in ("close", "forget"):
        pool = Verifier(2)
        assert pool.compare("5", "5.0") is Outcome.RIGHT
        processes = [worker._process for worker in pool._workers]
        assert len(processes) == 2
        if end == "close":
            pool.close()
            pool.close()
        else:
            del pool
            gc.collect()
        assert all(process.returncode == -signal.SIGKILL for process in processes)


@needs_linux
def test_workers_exit_when_their_parent_is_killed():
    parent = subprocess.run(
        [sys.executable, "-c", _DIES], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."}
    )
    assert parent.returncode == -signal.SIGKILL
    remaining = [Path("/proc", pid) for pid in parent.stdout.split()]
    assert len(remaining) == 2
    deadline = time.monotonic() + START_SECONDS
    while any(_runs(process) for process in remaining) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_runs(process) for process in remaining)


_DIES = """
import os, signal
from poly_epo_jax.tasks.verifier import Verifier
pool = Verifier(2)
pool.compare("5", "6")
print(*(worker._process.pid for worker in pool._workers), flush=True)
pool._workers[0]._process.stdin.write(b'["5", "(10^9)!"]\\n')
pool._workers[0]._process.stdin.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def _runs(process: Path) -> bool:
    """Returns True if a process is running. A zombie that has not been reaped does not count as running."""
    try:
        return process.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("reply", ["'unknown'", "[]", "None"])
def test_an_invalid_reply_is_a_crash(tmp_path: Path, reply: str):
    script = tmp_path / "grader.py"
    script.write_text(f"def open_grader():\n    return lambda answer: {reply}\n")
    verifier = Verifier(1, 2.0, 4.0, Grader("nothing", (str(script),)))
    try:
        assert verifier.call("an answer") is Outcome.CRASHED
        assert verifier.metrics() == {"grader/timeouts": 0.0, "grader/crashes": 1.0}
    finally:
        verifier.close()


def test_the_version_of_a_grader_depends_on_its_script(tmp_path: Path):
    script = tmp_path / "grader.py"

    def version(source: str) -> str:
        script.write_text(source)
        return Grader("math-verify", (str(script),)).version

    first, other = version("1"), version("2")
    assert first == version("1") != other
    assert first.startswith("math-verify ")
