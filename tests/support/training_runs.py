"""Small training runs of `python -m poly_epo_jax.main` in one or several processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import halting
from fakes import PATIENCE
from fork_server import ForkServer
from halting import HaltPoint
from reserved_ports import reserve_port
from user_packages import user_variables

from poly_epo_jax.config.keys import ModelSection
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.records.run_folder import METRICS, read_rows
from poly_epo_jax.startup.trained_policy import open_trained_policy
from poly_epo_jax.system.json_files import Row
from poly_epo_jax.types import Params

# The smallest policy, and small values for all other settings.
SETTINGS = {
    "task.options": "{'max_coefficient': 1, 'max_constant': 9, 'max_x': 1, 'num_train': 28, 'num_held_out': 8}",
    "base.clean_steps": 60,
    "base.noisy_steps": 4,
    "base.batch_size": 64,
    "base.hidden_size": 32,
    "base.mlp_size": 64,
    "base.num_layers": 1,
    "base.head_dim": 8,
    "train.prompts_per_batch": 8,
    "train.prompts_per_minibatch": 4,
    "train.rows_per_device": 16,
    "eval.num_problems": 8,
    "eval.num_generations": 8,
    "log.generations_every": 4,
}


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    return [f"--config.{key}={value}" for key, value in settings.items()]


def environment(compile_fast: bool = True, packages: Sequence[str] = (), path: str | Path = "") -> dict[str, str]:
    """Returns the environment variables of a process with one device and the packages of a user.

    Args:
      compile_fast: Whether the process compiles with the flags of the tests. Without these flags, long runs are faster.
      packages: Packages that the user has installed in addition.
      path: Additional folder from which modules can be imported.
    """
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "") if compile_fast else ""
    # All programs are cached, including those that compile quickly, so that only the first process starts slowly.
    variables = {"XLA_FLAGS": flags, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return os.environ | variables | user_variables(*packages, path=str(path))


def rows_of(folder: Path, metric: str = "reward") -> list[Row]:
    """Returns the rows of a run's metrics.jsonl that contain a metric. By default, these are the training steps."""
    return [row for row in read_rows(folder / METRICS) if metric in row]


Process = subprocess.Popen[bytes] | ForkServer


class Run:
    """A run folder in `root` and its processes. Each start of the run has `count` processes."""

    def __init__(
        self, root: Path, name: str, changes: Mapping[str, Any], count: int = 1, server: ForkServer | None = None
    ):
        """`changes` include `caches`, so that all runs share base policies and compiled programs.

        If `server` is not None, the only process is one of its forks.
        """
        self.folder, self.count, self._logs = root / name, count, [root / f"{name}-{i}.log" for i in range(count)]
        self._server = server
        self.changes = dict(changes)
        self._flags = as_flags(SETTINGS | self.changes | {"workdir": self.folder})
        self._environment = environment()

    def start(self, halt: HaltPoint | None = None, halted: int = 0) -> Sequence[Process]:
        """Starts all processes. If `halt` is not None, the process with the index `halted` waits there."""
        flags = [f"--config={halting.FILE if halt else 'configs/polynomial.py'}", *self._flags]
        if self._server is not None:
            self._server.start("poly_epo_jax.main", flags, self._logs[0], variables=halt.variables if halt else {})
            return [self._server]
        coordinator = f"127.0.0.1:{reserve_port()}"
        # By default, the coordinator of JAX listens on every interface.
        environment = self._environment | {"JAX_COORDINATOR_BIND_ADDRESS": coordinator}
        command = [sys.executable, "-m", "poly_epo_jax.main", *flags]
        processes = []
        for index, log in enumerate(self._logs):
            hosts = (
                {"coordinator_address": coordinator, "num_processes": self.count, "process_id": index}
                if self.count > 1
                else {}
            )
            with log.open("ab") as file:
                processes.append(
                    subprocess.Popen(
                        command + [f"--config.hosts.{key}={value}" for key, value in hosts.items()],
                        cwd=Path(__file__).parents[2],
                        env=environment | (halt.variables if halt and index == halted else {}),
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        return processes

    def finish(self) -> None:
        """Runs to the last step. All processes are terminated in any case."""
        processes = self.start()
        try:
            for index, process in enumerate(processes):
                assert process.wait(timeout=halting.SECONDS) == 0, self.log(index)
        finally:
            _kill(processes)

    def stop(self, at: str, number: signal.Signals, index: int = 0) -> list[int]:
        """Starts the run and sends a signal to one of its processes.

        Args:
          at: Point at which the process waits for the signal, see `halting.POINTS`.
          number: The signal.
          index: The process that receives the signal.

        Returns:
          The exit codes of all processes.
        """
        halt = HaltPoint(self.folder.with_name(f"{self.folder.name}.halted"), at)
        processes = self.start(halt, index)
        try:
            halt.wait(*processes, log=lambda: self._logs[index].read_text())
            processes[index].send_signal(number)
            return [process.wait(timeout=halting.SECONDS) for process in processes]
        finally:
            _kill(processes)

    def logged_steps(self) -> list[int]:
        """Returns the steps that have a row, in order."""
        return list(dict.fromkeys(row["step"] for row in read_rows(self.folder / METRICS)))

    def bytes(self, *names: str) -> list[bytes]:
        return [(self.folder / name).read_bytes() for name in names]

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name) for path in (self.folder / "checkpoints").iterdir() if path.name.isdigit())

    def params(self) -> Params:
        """Restores the weights of the last checkpoint on one device."""
        return open_trained_policy(self.folder, ModelSection(), make_mesh(1, 1, 1))[1]

    def log(self, index: int = 0, until: str = "") -> str:
        """Returns the output of a process after it ends with `until`. A watchdog may still print after the exit."""
        deadline = time.monotonic() + PATIENCE
        while not self._logs[index].read_text().strip().endswith(until):
            assert time.monotonic() < deadline, self._logs[index].read_text()
            time.sleep(0.01)
        return self._logs[index].read_text()


def _kill(processes: Sequence[Process]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
