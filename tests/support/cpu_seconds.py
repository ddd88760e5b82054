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
      total: CPU seconds of the session, which are known at its end.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.by_file = collections.Counter[str]()
        self.total = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.user_properties.append(("cpu_start", used()))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Adds the seconds since the start of a test to the report of its last phase, which workers send."""
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("cpu_seconds", used() - dict(item.user_properties)["cpu_start"]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.by_file[report.nodeid.partition("::")[0]] += float(dict(report.user_properties).get("cpu_seconds", 0))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Compares the total with the limit, after the workers have ended."""
        self.total = used()
        if self.total > self.limit and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("CPU seconds")
        for name, seconds in self.by_file.most_common(NUM_FILES):
            terminalreporter.write_line(f"{seconds:7.1f}  {name}")
        message = f"{self.total:7.1f}  in total, of at most {self.limit:.0f} (--max-cpu-seconds)"
        terminalreporter.write_line(message, red=self.total > self.limit)
