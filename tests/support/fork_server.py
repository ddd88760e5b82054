"""Starts commands of the package in forks of one process that has already executed their slow imports.

Forks do not inherit a JAX backend; each creates its own. `ForkServer` is the client. This file is executed as the
server.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import quick_compiles

ROOT = Path(__file__).parents[2]

IMPORTED = [
    "poly_epo_jax.main",
    *(f"poly_epo_jax.evaluate.{name}" for name in ("benchmarks", "draw", "results")),
    "poly_epo_jax.report.build",
]
"""Preloaded modules. `poly_epo_jax.evaluate.__main__` is missing because it is executed and not imported."""


class ForkServer:
    """Runs one command at a time: `start` it, and use the server like its `subprocess.Popen`; or `run` it.

    Args:
      variables: Environment variables of the imports and of all commands, in addition to those of this process.
    """

    def __init__(self, variables: Mapping[str, str] = MappingProxyType({})):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": quick_compiles.FLAGS,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": str(ROOT),
            **variables,
        }
        pipe = subprocess.PIPE
        command = [sys.executable, __file__]
        # Without buffers, `select` reports each unread line.
        self._server = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, bufsize=0)
        assert self._server.stdout
        self._stdout, self._pid, self._code = self._server.stdout, 0, None

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        errors: Path | None = None,
        folder: Path = ROOT,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> int:
        """Starts `python -m module arguments`.

        Args:
          module: Module to execute.
          arguments: Command line arguments.
          log: File to which the output is appended.
          errors: File to which stderr is appended. If None, it is appended to `log`.
          folder: Working directory, from which modules can be imported.
          variables: Additional environment variables.

        Returns:
          The process id.
        """
        assert self._server.stdin
        files = [str(log), str(errors or log), str(folder)]
        self._server.stdin.write(json.dumps([module, list(arguments), *files, dict(variables)]).encode() + b"\n")
        self._pid, self._code = int(self._line()), None
        return self._pid

    def poll(self) -> int | None:
        """Returns the exit code of the command, or None while it is running."""
        is_known = self._code is not None or select.select([self._stdout], [], [], 0)[0]
        return self.wait() if is_known else None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the command and returns its exit code, which is negative if a signal terminated it."""
        if self._code is None:
            if not select.select([self._stdout], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("command", timeout or 0)
            self._code = int(self._line())
        return self._code

    def run(self, module: str, arguments: Sequence[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as files:
            log, errors = Path(files, "log"), Path(files, "errors")
            self.start(module, arguments, log, errors, folder)
            return subprocess.CompletedProcess([module, *arguments], self.wait(), log.read_text(), errors.read_text())

    def send_signal(self, number: int) -> None:
        os.kill(self._pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait()
        self._stdout.close()

    def _line(self) -> bytes:
        return self._stdout.readline()


def _child(module: str, arguments: list[str], log: str, errors: str, folder: str, variables: dict[str, str]) -> None:
    for stream, file in ((1, log), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(folder)
    os.environ.update(variables)
    sys.path[0] = folder  # as with `python -m`
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores SIGHUP, and background shells ignore SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if module == "poly_epo_jax.report":
        gc.callbacks.clear()  # JAX's callback may discard a Ctrl-C; the command itself does not import JAX
    sys.modules.pop(module, None)  # the module is executed, not imported
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def serve() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    from jax._src import xla_bridge

    assert not xla_bridge._backends, "a fork cannot use an existing backend"
    gc.freeze()  # collections in forks do not read the objects of imported modules
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _child(*json.loads(line))
            sys.exit()
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
