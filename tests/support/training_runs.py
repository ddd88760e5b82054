"""Real training runs, small enough for a test: `python -m poly_epo_jax.main` in one process or several."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fakes import PATIENCE
from sglang_servers import free_port
from user_packages import user_variables

from poly_epo_jax.config.keys import ModelSection
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.records.run_folder import METRICS, read_rows
from poly_epo_jax.startup.trained_policy import open_trained_policy
from poly_epo_jax.system.json_files import Row
from poly_epo_jax.types import Params

# The smallest policy, and small settings throughout.
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
    """Of a process with one device, which has what a user's has: the requirements of the package.

    Args:
      compile_fast: it compiles as the tests do, or else as users do: long runs are shorter so.
      packages: what this user has installed besides.
      path: a folder from which it imports, too.
    """
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "") if compile_fast else ""
    # Every program is cached, not only those that compile slowly: all processes except the first start fast.
    variables = {"XLA_FLAGS": flags, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return os.environ | variables | user_variables(*packages, path=str(path))


def rows_of(folder: Path, metric: str = "reward") -> list[Row]:
    """Returns the rows of a run's metrics.jsonl that hold a metric: by default those of its training steps."""
    return [row for row in read_rows(folder / METRICS) if metric in row]


class Run:
    """A run folder below `root` and the processes that work on it: `count` at a time, one after the other."""

    def __init__(self, root: Path, name: str, changes: Mapping[str, Any], count: int = 1):
        """`changes` hold the session's `caches`, so that what one run has made the others find."""
        self.folder, self.count, self._logs = root / name, count, [root / f"{name}-{i}.log" for i in range(count)]
        self.changes = dict(changes)
        flags = as_flags(SETTINGS | self.changes | {"workdir": self.folder})
        self._command = [sys.executable, "-m", "poly_epo_jax.main", "--config=configs/polynomial.py", *flags]
        self._environment = environment()

    def start(self) -> list[subprocess.Popen[bytes]]:
        coordinator = f"127.0.0.1:{free_port()}"
        # JAX's coordinator would listen on every interface.
        environment = self._environment | {"JAX_COORDINATOR_BIND_ADDRESS": coordinator}
        processes = []
        for index, log in enumerate(self._logs):
            hosts = {"coordinator": coordinator, "count": self.count, "index": index} if self.count > 1 else {}
            with log.open("ab") as file:
                processes.append(
                    subprocess.Popen(
                        self._command + [f"--config.hosts.{key}={value}" for key, value in hosts.items()],
                        cwd=Path(__file__).parents[2],
                        env=environment,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        return processes

    def finish(self) -> None:
        """Runs to the end; whatever happens, no process is left."""
        processes = self.start()
        try:
            for index, process in enumerate(processes):
                assert process.wait(timeout=300) == 0, self.log(index)
        finally:
            _kill(processes)

    def stop(self, step: int, delay: float, number: signal.Signals, index: int = 0) -> list[int]:
        """Starts the run, sends one of its processes a signal `delay` seconds after the step's row was written.

        Returns the exit codes of all.
        """
        processes = self.start()
        try:
            while len(self.logged_steps()) <= step:
                assert all(process.poll() is None for process in processes), self.log()
                time.sleep(0.002)
            time.sleep(delay)
            processes[index].send_signal(number)
            return [process.wait(timeout=300) for process in processes]
        finally:
            _kill(processes)

    def logged_steps(self) -> list[int]:
        """The steps that have a row, in order."""
        return list(dict.fromkeys(row["step"] for row in read_rows(self.folder / METRICS)))

    def bytes(self, *names: str) -> list[bytes]:
        return [(self.folder / name).read_bytes() for name in names]

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name) for path in (self.folder / "checkpoints").iterdir() if path.name.isdigit())

    def params(self) -> Params:
        """The weights of the last checkpoint, on one device."""
        return open_trained_policy(self.folder, ModelSection(), make_mesh(1, 1, 1))[1]

    def log(self, index: int = 0, until: str = "") -> str:
        """What a process has said, once that ends with `until`: its watchdog may have the last word when it is gone."""
        deadline = time.monotonic() + PATIENCE
        while not self._logs[index].read_text().strip().endswith(until):
            assert time.monotonic() < deadline, self._logs[index].read_text()
            time.sleep(0.01)
        return self._logs[index].read_text()


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
