"""pytest plugin that measures the CPU seconds of each test file, including those of child processes.

`--max-cpu-seconds=N` prints the ten test files that use the most, and fails if the total, which includes imports,
exceeds N after conversion to the CPU that `REFERENCE_SECONDS` describes. The CPU seconds of the same tests differ by a
factor of two between virtual machines, because cores share caches and memory with other programs. A fixed piece of work
is therefore timed throughout the session, at the same load as the tests.
"""

import argparse
import collections
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

NUM_FILES = 10
"""Number of printed test files."""

REFERENCE_SECONDS = 0.021
"""CPU seconds of `reference_work` on the CPU whose seconds the limit states, while a second core runs tests."""

INTERVAL = 5.0
"""CPU seconds of tests between two measurements of the reference work, which takes about 1% of the time."""


def _live_children(parent: int) -> float:
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_bytes().rpartition(b")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(fields[1]) == parent:
            ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")


def used() -> float:
    """Returns the CPU seconds of this process and of its finished and running child processes."""
    return sum(os.times()[:4]) + _live_children(os.getpid())


def reference_work() -> float:
    """Compiles a large module of the standard library, and returns its CPU seconds.

    Like the compilation of XLA programs, which most tests spend their time on, it allocates and follows many pointers.
    """
    source = Path(argparse.__file__).read_text()
    start = time.thread_time()
    compile(source, "argparse.py", "exec")
    return time.thread_time() - start


class CpuSeconds:
    """Adds up the CPU seconds of all tests.

    Attributes:
      limit: Maximum number of CPU seconds of the session, on the CPU that `REFERENCE_SECONDS` describes.
      by_file: CPU seconds by test file.
      references: CPU seconds of the measurements of the reference work, of all workers.
      start: CPU seconds of this process at the start of the current test.
      since_reference: CPU seconds of tests of this process since its last measurement of the reference work.
      total: CPU seconds of the session, which are known at its end.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.by_file: dict[str, float] = collections.defaultdict(float)
        self.references: list[float] = []
        self.start, self.since_reference, self.total = 0.0, 0.0, 0.0

    @property
    def slowdown(self) -> float:
        """CPU seconds of this session per CPU second of the limit. Without a measurement, 1."""
        return statistics.fmean(self.references) / REFERENCE_SECONDS if self.references else 1.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.start = used()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Adds the measurements since the start of a test to the report of its last phase, which workers send."""
        report = yield
        if call.when == "teardown":
            seconds = used() - self.start
            report.user_properties.append(("cpu_seconds", seconds))
            self.since_reference += seconds
            if self.since_reference > INTERVAL:
                self.since_reference = 0.0
                report.user_properties.append(("reference_seconds", reference_work()))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cpu_seconds" and isinstance(value, float):
                self.by_file[report.nodeid.partition("::")[0]] += value
            if name == "reference_seconds" and isinstance(value, float):
                self.references.append(value)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Compares the total with the limit, after the workers have ended."""
        self.total = used()
        if self.total > self.limit * self.slowdown and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("CPU seconds")
        for name, seconds in sorted(self.by_file.items(), key=lambda item: -item[1])[:NUM_FILES]:
            terminalreporter.write_line(f"{seconds:7.1f}  {name}")
        terminalreporter.write_line(f"{self.total:7.1f}  in total")
        terminalreporter.write_line(
            f"{self.total / self.slowdown:7.1f}  in total on the CPU of the limit, of at most {self.limit:.0f} "
            f"(--max-cpu-seconds), because the reference work takes {self.slowdown:.2f} times as long here",
            red=self.total > self.limit * self.slowdown,
        )
