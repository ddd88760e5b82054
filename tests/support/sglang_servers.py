"""Starts and stops real SGLang servers and routers on CPU, each in its own process group."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from reserved_ports import reserve_port

ROOT = Path(__file__).parents[2]
SGLANG = ROOT / "third_party" / "sglang"
STARTED_WITHIN = 300.0  # Start timeout in seconds. A start takes 15 s on an idle machine.


def require_sglang() -> None:
    """Skips the test if the SGLang environment is not installed, or fails it if POLY_EPO_REQUIRE_SGLANG is set."""
    if any((SGLANG / "env-cpu").glob("installed-*")):
        return
    reason = "SGLang's CPU environment is not installed: bash third_party/sglang/setup.sh cpu"
    if os.environ.get("POLY_EPO_REQUIRE_SGLANG"):
        pytest.fail(reason)
    pytest.skip(reason)


def require_torch() -> str:
    """Skips the test if torch is not installed, unless POLY_EPO_REQUIRE_TORCH is set. Torch is used for tensor pushes.

    Returns:
      Folder of torch, for the PYTHONPATH of processes that import it.
    """
    if not os.environ.get("POLY_EPO_REQUIRE_TORCH"):
        pytest.importorskip("torch", reason="torch is not installed: bash launch/test.sh all installs it for CPUs")
    return os.path.join(sys.prefix, "torch")


class SGLangServer:
    """A server of the model in a folder.

    Args:
      model: Folder of the model.
      log: File to which the output of the server is appended.
      *flags: Additional flags of sglang.launch_server.
    """

    def __init__(self, model: Path, log: Path, *flags: str):
        self.port = reserve_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._command = ["bash", str(SGLANG / "serve.sh"), "cpu", str(model), str(self.port), *flags]
        # One thread, because idle threads busy-wait and would slow down other processes.
        self._variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SGLANG / "cpu_shim")}
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Starts the process without waiting for it."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=os.environ | self._variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Waits until the server responds.

        Raises:
          TimeoutError: If it does not respond within STARTED_WITHIN seconds.
        """
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
        """Starts the process and waits until the server responds."""
        self.launch()
        self.wait()
        return self

    def requests(self) -> list[str]:
        """Returns the paths of all successful POST requests in order, including those before a restart."""
        answered = re.findall(r'"POST /(\w+) HTTP/1.1" 200', self._log.read_text())
        return [path for path in answered if path != "freeze_gc"]  # Sent by the server itself after its start.

    def kill(self) -> None:
        """Kills the server and its subprocesses with SIGKILL. The port is free afterwards."""
        if self._process is not None:
            self.send(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, such as SIGSTOP, to the server and its subprocesses."""
        assert self._process is not None
        for pid in [self._process.pid, *descendants(self._process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


AnyServer = TypeVar("AnyServer", bound=SGLangServer)


@contextlib.contextmanager
def running(servers: list[AnyServer]) -> Iterator[list[AnyServer]]:
    """Starts servers in parallel, and kills them when the context ends."""
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
    """A router of SGLang in front of servers.

    Args:
      servers: Workers of the router.
      log: File to which the output of the router is appended.
    """

    def __init__(self, servers: Sequence[SGLangServer], log: Path):
        super().__init__(Path(), log)
        python = str(SGLANG / "env-cpu" / "bin" / "python")
        self._command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(self.port)]
        self._command += ["--worker-urls", *(server.url for server in servers), "--policy", "round_robin"]
        self._command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(reserve_port())]

    def workers(self) -> set[str]:
        """Returns the URLs of the workers that the router lists."""
        return {worker["url"] for worker in httpx.get(f"{self.url}/workers").json()["workers"]}

    def _answers(self) -> bool:
        return httpx.get(f"{self.url}/readiness", timeout=20).status_code == 200


def descendants(pid: int) -> list[int]:
    """Returns the ids of all descendants of a process whose parents are still running."""
    children: list[int] = []
    with contextlib.suppress(OSError):  # The process or thread has ended in the meantime.
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return [one for child in children for one in [child, *descendants(child)]]
