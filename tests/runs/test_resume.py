"""A run that is killed and restarted writes the same bytes and weights as an uninterrupted run."""

import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from fork_server import ForkServer
from training_runs import Run, rows_of

from poly_epo_jax.config.keys import ModelSection
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.records.run_folder import read_rows
from poly_epo_jax.startup.trained_policy import open_trained_policy

LAST_STEP, CHECKPOINT_EVERY = 12, 3
CHANGES = {
    "algo.num_sets": 20,  # sets are sampled with a key, which must be the same after a restart
    "algo.kl_coef": 0.01,  # requires the same initial policy after a restart
    "train.refill": True,
    "train.num_steps": LAST_STEP,
    "checkpoint.every": CHECKPOINT_EVERY,
    "eval.every": 4,
}
REPRODUCED = ("metrics.jsonl", "generations.jsonl")


def test_a_killed_and_resumed_run_writes_the_same_bytes(
    tmp_path: Path, caches: dict[str, Path], fork_server: ForkServer
):
    """A short form of the slow tests below."""
    changes = CHANGES | caches | {"train.num_steps": 4, "checkpoint.every": 2, "eval.every": 4}
    uninterrupted, killed = (Run(tmp_path, name, changes, server=fork_server) for name in ("uninterrupted", "killed"))
    uninterrupted.finish()
    assert killed.stop("update 4", signal.SIGKILL) == [-signal.SIGKILL]
    assert killed.checkpoints() == [2]
    killed.finish()
    assert killed.bytes(*REPRODUCED) == uninterrupted.bytes(*REPRODUCED)
    (first, second) = (jax.tree.leaves(run.params()) for run in (uninterrupted, killed))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)
    assert any(row["policy/update_norm"] > 0 for row in read_rows(killed.folder / "metrics.jsonl") if "reward" in row)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, caches: dict[str, Path]) -> Run:
    """Not a fork, so that the order of its sets of strings differs from that of the interrupted run."""
    run = Run(tmp_path_factory.mktemp("resume"), "uninterrupted", CHANGES | caches)
    run.finish()
    return run


@pytest.fixture(scope="module")
def interrupted(uninterrupted: Run, fork_server: ForkServer) -> Run:
    """Killed twice, once while a checkpoint is written, then stopped with SIGTERM, then finished."""
    run = Run(uninterrupted.folder.parent, "interrupted", uninterrupted.changes, server=fork_server)
    assert run.stop("update 2", signal.SIGKILL) == [-signal.SIGKILL]
    assert run.stop(f"commit {2 * CHECKPOINT_EVERY}", signal.SIGKILL) == [-signal.SIGKILL]
    assert run.checkpoints() == [CHECKPOINT_EVERY] and run.logged_steps()[-1] == 2 * CHECKPOINT_EVERY

    assert run.stop("update 8", signal.SIGTERM) == [128 + signal.SIGTERM]
    (message,) = [line for line in run.log().splitlines() if line.startswith("SIGTERM")]
    assert message == f"SIGTERM: Saved after step {run.checkpoints()[-1]}. Rerun the command to resume."
    assert run.logged_steps() == list(range(run.checkpoints()[-1] + 1))
    run.finish()
    return run


@pytest.mark.slow
def test_the_run_learns(uninterrupted: Run):
    """Without weight changes, the comparisons below would be trivial."""
    rows = read_rows(uninterrupted.folder / "metrics.jsonl")
    trained, evaluated = ([row for row in rows if name in row] for name in ("reward", "eval/reward"))
    assert [row["step"] for row in trained] == list(range(1, LAST_STEP + 1))
    assert [row["step"] for row in evaluated] == [0, 4, 8, 12]
    assert len(rows) == len(trained) + len(evaluated)
    assert sum(row["policy/update_norm"] > 0 for row in trained) > LAST_STEP / 2
    assert any(row["advantage"] for row in read_rows(uninterrupted.folder / "generations.jsonl"))
    assert trained[-1]["policy/reference_kl"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", REPRODUCED)
def test_rows_are_identical(uninterrupted: Run, interrupted: Run, name: str):
    assert interrupted.bytes(name) == uninterrupted.bytes(name)


def restored(run: Run) -> tuple[Any, Any]:
    """Returns the arrays and the data position of the last checkpoint."""
    with ocp.CheckpointManager(run.folder / "checkpoints") as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(), data=ocp.args.JsonRestore())
        found = manager.restore(LAST_STEP, args=args)
    return found.state, found.data


@pytest.mark.slow
def test_final_checkpoints_are_identical(uninterrupted: Run, interrupted: Run):
    (states, positions) = zip(restored(uninterrupted), restored(interrupted), strict=True)
    flat, trees = zip(*map(jax.tree.flatten, states), strict=True)
    assert trees[0] == trees[1]
    assert len(flat[0]) > 30  # weights, and two moments of each weight
    for one, other in zip(*flat, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)
    assert positions[0] == positions[1]


@pytest.mark.slow
def test_restarting_a_finished_run_changes_nothing(uninterrupted: Run):
    names = [*REPRODUCED, "timing.jsonl", "config.json"]
    before = uninterrupted.bytes(*names), uninterrupted.checkpoints()
    uninterrupted.finish()
    assert (uninterrupted.bytes(*names), uninterrupted.checkpoints()) == before


def kept_checkpoints(values: dict[int, float], every: int, last_step: int) -> list[list[int]]:
    """Returns the steps with a checkpoint after each save, if the newest and the best checkpoint are kept."""
    kept: list[list[int]] = []
    for step in range(1, last_step + 1):
        if step in (every, last_step) or all(values[step] > values[one] for one in range(1, step)):
            best = min(range(1, step + 1), key=lambda one: (-values[one], one))
            kept.append(sorted({best, step}))
    return kept


@pytest.mark.slow
def test_the_best_checkpoint_survives_a_kill_between_saving_and_deletion(
    tmp_path: Path, caches: dict[str, Path], fork_server: ForkServer
):
    changes = CHANGES | caches | {"train.num_steps": 9, "checkpoint.every": 5, "eval.every": 1, "checkpoint.keep": 1}
    metric = "eval/incorrect_clusters@8"  # neither the first nor the last evaluation has its highest value
    changes |= {"checkpoint.best": metric, "optimizer.schedule": "constant", "optimizer.learning_rate": 5e-3}
    uninterrupted, killed = (Run(tmp_path, name, changes, server=fork_server) for name in ("uninterrupted", "killed"))
    uninterrupted.finish()
    values = {row["step"]: row[metric] for row in rows_of(uninterrupted.folder, metric)}
    kept = kept_checkpoints(values, 5, 9)
    best = kept[-1][0]
    assert uninterrupted.checkpoints() == kept[-1] == [best, 9] and best > 1, values
    assert f"Best checkpoint: step {best}, {metric} {values[best]:.3f}." in uninterrupted.log()
    deletions = [(one, before, after) for before, after in pairwise(kept) for one in set(before) - set(after)]
    for deleted, before, after in deletions[-2:]:
        assert killed.stop(f"deletion {deleted}", signal.SIGKILL) == [-signal.SIGKILL]
        assert killed.checkpoints() == sorted({*before, *after})
    killed.finish()
    assert killed.checkpoints() == kept[-1] and killed.bytes(*REPRODUCED) == uninterrupted.bytes(*REPRODUCED)
    assert open_trained_policy(killed.folder, ModelSection(), make_mesh(1, 1, 1), "best")[2] == best
