"""pytest plugin that measures the CPU seconds of each test file, including those of child processes.

`--max-cpu-seconds=N` prints the ten test files that use the most, and fails if the total, which includes imports,
exceeds N. In contrast to wall time, CPU seconds hardly depend on other programs.
"""

import collections
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

NUM_FILES = 10
"""Number of printed test files."""


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


class CpuSeconds:
    """Adds up the CPU seconds of all tests.

    Attributes:
      limit: Maximum number of CPU seconds of the session.
      by_file: CPU seconds by test file.
      start: CPU seconds of this process at the start of the current test.
      total: CPU seconds of the session, which are known at its end.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.by_file: dict[str, float] = collections.defaultdict(float)
        self.start, self.total = 0.0, 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.start = used()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Adds the seconds since the start of a test to the report of its last phase, which workers send."""
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("cpu_seconds", used() - self.start))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cpu_seconds" and isinstance(value, float):
                self.by_file[report.nodeid.partition("::")[0]] += value

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Compares the total with the limit, after the workers have ended."""
        self.total = used()
        if self.total > self.limit and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("CPU seconds")
        for name, seconds in sorted(self.by_file.items(), key=lambda item: -item[1])[:NUM_FILES]:
            terminalreporter.write_line(f"{seconds:7.1f}  {name}")
        message = f"{self.total:7.1f}  in total, of at most {self.limit:.0f} (--max-cpu-seconds)"
        terminalreporter.write_line(message, red=self.total > self.limit)
