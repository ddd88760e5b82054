"""A real run that is killed and started again leaves the bytes, and the weights, of one that never was."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from poly_epo_jax.tracking import read_rows

pytestmark = pytest.mark.slow

LAST_STEP, CHECKPOINT_EVERY = 24, 5
SETTINGS = {
    "task.options": "{'max_coefficient': 1, 'max_constant': 9, 'max_x': 1, 'num_train': 28, 'num_held_out': 8}",
    "base.clean_steps": 60,
    "base.noisy_steps": 4,
    "base.batch_size": 64,
    "base.hidden_size": 32,
    "base.mlp_size": 64,
    "base.num_layers": 1,
    "base.head_dim": 8,
    "algo.num_sets": 20,  # drawn by a key, which must be the same after a restart
    "algo.kl_coef": 0.01,  # so is the initial policy
    "train.num_steps": LAST_STEP,
    "train.prompts_per_batch": 8,
    "train.prompts_per_minibatch": 4,
    "train.rows_per_device": 16,
    "checkpoint.every": CHECKPOINT_EVERY,
    "eval.every": 8,
    "eval.num_problems": 8,
    "eval.num_generations": 8,
    "log.samples_every": 4,
}
REPRODUCED = ("metrics.jsonl", "samples.jsonl")


class Run:
    """A run folder below `root` and the processes that work on it, one after the other."""

    def __init__(self, root: Path, name: str):
        self.folder, self._log = root / name, root / f"{name}.log"
        caches = {"base.cache_dir": root / "base", "compilation_cache": root / "compiled", "workdir": self.folder}
        flags = [f"--config.{key}={value}" for key, value in (SETTINGS | caches).items()]
        self._command = [sys.executable, "-m", "poly_epo_jax.main", "--config=configs/polynomial.py", *flags]
        devices = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
        # Every program goes to the cache, not only what takes long to compile: all processes but the first start fast.
        self._environment = os.environ | {"XLA_FLAGS": devices, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                cwd=Path(__file__).parents[1],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self) -> None:
        assert self.start().wait(timeout=300) == 0, self.log()

    def stop(self, step: int, delay: float, number: signal.Signals) -> int:
        """Starts the run, sends it a signal `delay` seconds after the step's row was written; returns the exit code."""
        process = self.start()
        while self.rows_written() <= step:
            assert process.poll() is None, self.log()
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(number)
        return process.wait(timeout=60)

    def rows_written(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def bytes(self, *names: str) -> list[bytes]:
        return [(self.folder / name).read_bytes() for name in names]

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name) for path in (self.folder / "checkpoints").iterdir() if path.name.isdigit())

    def restored(self) -> tuple[Any, Any]:
        """Arrays and data position of the last checkpoint."""
        with ocp.CheckpointManager(self.folder / "checkpoints") as manager:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(), data=ocp.args.JsonRestore())
            found = manager.restore(LAST_STEP, args=args)
        return found.state, found.data

    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("resume"), "whole")
    run.finish()
    return run


@pytest.fixture(scope="module")
def broken(whole: Run) -> Run:
    """Killed three times, once while a checkpoint is being written, then told to end, then left alone."""
    run = Run(whole.folder.parent, "broken")
    rng = np.random.default_rng(0)
    one_step = float(np.median([row["seconds/step"] for row in read_rows(whole.folder / "timing.jsonl")[2:]]))

    assert run.stop(3, rng.uniform(0, 2 * one_step), signal.SIGKILL) == -signal.SIGKILL
    assert run.stop(2 * CHECKPOINT_EVERY, rng.uniform(0, one_step / 2), signal.SIGKILL) == -signal.SIGKILL
    assert run.checkpoints(), "the next start must have something to resume from"
    assert run.stop(14, rng.uniform(0, 2 * one_step), signal.SIGKILL) == -signal.SIGKILL

    assert run.stop(17, rng.uniform(0, 2 * one_step), signal.SIGTERM) == 128 + signal.SIGTERM
    (message,) = [line for line in run.log().splitlines() if line.startswith("SIGTERM")]
    assert message == f"SIGTERM: saving after step {run.checkpoints()[-1]}; the same command resumes there."
    assert run.rows_written() == run.checkpoints()[-1] + 1
    run.finish()
    return run


def test_the_run_learns_something(whole: Run):
    """Otherwise there would be little to reproduce."""
    rows = read_rows(whole.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(LAST_STEP + 1))
    assert sum(row["policy/update_norm"] > 0 for row in rows[1:]) > LAST_STEP / 2
    assert any(row["advantage"] for row in read_rows(whole.folder / "samples.jsonl"))
    assert rows[-1]["policy/reference_kl"] > 0


@pytest.mark.parametrize("name", REPRODUCED)
def test_rows_are_identical(whole: Run, broken: Run, name: str):
    assert broken.bytes(name) == whole.bytes(name)


def test_final_checkpoints_are_identical(whole: Run, broken: Run):
    (states, positions) = zip(whole.restored(), broken.restored(), strict=True)
    flat, trees = zip(*map(jax.tree.flatten, states), strict=True)
    assert trees[0] == trees[1]
    assert len(flat[0]) > 30  # weights and two moments of each
    for one, other in zip(*flat, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)
    assert positions[0] == positions[1]


def test_a_finished_run_started_again_changes_nothing(whole: Run):
    names = [*REPRODUCED, "timing.jsonl", "config.json"]
    before = whole.bytes(*names), whole.checkpoints()
    whole.finish()
    assert (whole.bytes(*names), whole.checkpoints()) == before
