"""Real SGLang servers on the CPU, each in its own process group and stopped by the process that started it."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

ROOT = Path(__file__).parents[2]
SGLANG = ROOT / "third_party" / "sglang"
STARTED_WITHIN = 300.0  # seconds; 15 on an idle machine


def require_sglang() -> None:
    """Skips, or where POLY_EPO_REQUIRE_SGLANG is set fails, the test that cannot run without SGLang's environment."""
    if any((SGLANG / "env-cpu").glob("installed-*")):
        return
    reason = "SGLang's CPU environment is not installed: bash third_party/sglang/setup.sh cpu"
    if os.environ.get("POLY_EPO_REQUIRE_SGLANG"):
        pytest.fail(reason)
    pytest.skip(reason)


def require_torch() -> str:
    """Likewise without torch, whose tensors SGLang takes weights as, where they are handed over in memory.

    Returns the PYTHONPATH of a process that needs it.
    """
    if not os.environ.get("POLY_EPO_REQUIRE_TORCH"):
        pytest.importorskip("torch", reason="torch is not installed: bash launch/test.sh installs it for CPUs")
    return os.path.join(sys.prefix, "torch")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class SGLangServer:
    """A server of the model in a folder; `start` returns once it answers, `kill` is SIGKILL."""

    def __init__(self, model: Path, log: Path, *flags: str):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._command = ["bash", str(SGLANG / "serve.sh"), "cpu", str(model), str(self.port), *flags]
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        # The server's threads would spin while others need the cores.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SGLANG / "cpu_shim")}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        deadline = time.monotonic() + STARTED_WITHIN
        while time.monotonic() < deadline:
            assert self._process is not None and self._process.poll() is None, self._log.read_text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                if self._answers():
                    return
            time.sleep(0.5)
        raise TimeoutError(self._log.read_text()[-3000:])

    def _answers(self) -> bool:
        return httpx.get(f"{self.url}/health", timeout=20).status_code == 200

    def start(self) -> "SGLangServer":
        self.launch()
        self.wait()
        return self

    def requests(self) -> list[str]:
        """The paths of the POST requests that it has answered, in order, also before it was last killed."""
        answered = re.findall(r'"POST /(\w+) HTTP/1.1" 200', self._log.read_text())
        return [path for path in answered if path != "freeze_gc"]  # its own, when it has started

    def kill(self) -> None:
        """Ends the server, its scheduler and its detokenizer at once; the port is free afterwards."""
        if self._process is not None:
            self.send(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, such as SIGSTOP, to the server and all that it has started."""
        assert self._process is not None
        for pid in [self._process.pid, *descendants(self._process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


AnyServer = TypeVar("AnyServer", bound=SGLangServer)


@contextlib.contextmanager
def running(servers: list[AnyServer]) -> Iterator[list[AnyServer]]:
    """Starts them side by side, and ends them whatever happens."""
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()


class Router(SGLangServer):
    """SGLang's router in front of servers, with the same way to start and to end."""

    def __init__(self, servers: Sequence[SGLangServer], log: Path):
        super().__init__(Path(), log)
        python = str(SGLANG / "env-cpu" / "bin" / "python")
        self._command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(self.port)]
        self._command += ["--worker-urls", *(server.url for server in servers), "--policy", "round_robin"]
        self._command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]

    def workers(self) -> set[str]:
        """URLs of the servers that it gives prompts to."""
        return {worker["url"] for worker in httpx.get(f"{self.url}/workers").json()["workers"]}

    def _answers(self) -> bool:
        return httpx.get(f"{self.url}/readiness", timeout=20).status_code == 200


def descendants(pid: int) -> list[int]:
    """Ids of all that a process has started, and what these have, as far as their parents still run."""
    children: list[int] = []
    with contextlib.suppress(OSError):  # the process, or one of its threads, has ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return [one for child in children for one in [child, *descendants(child)]]
