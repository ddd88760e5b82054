"""What a checkpoint gives back is bit for bit what was saved, on whatever mesh."""

import shutil

import jax
import numpy as np
import pytest
from fakes import TINY_MODEL, optimizer_config, tiny_params, tiny_problems

from poly_epo_jax.checkpoint import Checkpoints
from poly_epo_jax.data import problem_batches
from poly_epo_jax.model.partition import merge_params
from poly_epo_jax.model.sharding import make_mesh
from poly_epo_jax.objective import Objective
from poly_epo_jax.set_rl import policy_gradient_loss
from poly_epo_jax.update import PolicyUpdate

needs_eight_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
ON_ONE_DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def make_update(*axes, trainable=""):
    config = optimizer_config(schedule="linear", warmup_updates=2)
    objective = Objective(policy_gradient_loss)
    return PolicyUpdate(TINY_MODEL, make_mesh(*axes), objective, config, total_updates=9, trainable=trainable)


def random_state(update, seed=0):
    """A state in which every number is random: weights, both moments and the counts."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        drawn = rng.integers(1, 1000, leaf.shape) if leaf.dtype == np.int32 else rng.standard_normal(leaf.shape)
        return np.asarray(drawn, leaf.dtype)

    return jax.device_put(jax.tree.map(draw, update.abstract_state), update.shardings)


def assert_trees_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@needs_eight_devices
def test_a_state_moves_between_meshes(tmp_path):
    update = make_update(2, 2, 2)
    state = random_state(update)
    assert len(jax.tree.leaves(state)) > 3 * len(jax.tree.leaves(tiny_params()))
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(5, state, {"position": 3})
    checkpoints.close()
    for axes in ((1, 8, 1), (1, 1, 1)):
        onto = make_update(*axes)
        checkpoints = Checkpoints(tmp_path, keep=2)
        assert checkpoints.latest_step == 5
        restored, data_state = checkpoints.restore(5, onto.abstract_state, onto.shardings)
        checkpoints.close()
        assert_trees_equal(restored, state)
        assert jax.tree.map(lambda leaf: leaf.sharding, restored) == onto.shardings
        assert data_state == {"position": 3}


@pytest.mark.parametrize("axes", [(1, 1, 1), pytest.param((2, 2, 2), marks=needs_eight_devices)])
def test_what_is_donated_after_save_returns_is_saved_nevertheless(tmp_path, axes):
    update = make_update(*axes)
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 + 7, state), donate_argnums=0)
    donated = random_state(update)
    overwrite(donated)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
    saved, checkpoints = {}, Checkpoints(tmp_path, keep=5)
    for step in range(1, 6):
        state = random_state(update, step)
        saved[step] = jax.tree.map(np.array, state)
        checkpoints.save(step, state, {})
        overwritten = overwrite(state)
        assert all((np.asarray(leaf) == 7).all() for leaf in jax.tree.leaves(overwritten))
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step, expected in saved.items():
        assert_trees_equal(checkpoints.restore(step, update.abstract_state, update.shardings)[0], expected)
    checkpoints.close()


@pytest.mark.parametrize("pattern", ["", r"layers\..*"], ids=["all", "part"])
def test_weights_alone_come_back_whole(tmp_path, pattern):
    update = make_update(1, 1, 1, trainable=pattern)
    state, checkpoints = random_state(update), Checkpoints(tmp_path)
    checkpoints.save(3, state, {})
    checkpoints.close()
    shardings = merge_params(update.shardings.trainable, update.shardings.frozen)
    restored = Checkpoints(tmp_path).restore_params(3, update.abstract_state.params, shardings, pattern)
    assert_trees_equal(restored, state.params)


def test_data_goes_on_with_the_very_same_problems(tmp_path):
    problems = tiny_problems(10, 4)
    state = {"x": np.arange(3.0)}
    batches = problem_batches(problems, 4, seed=3)
    for _ in range(2):
        next(batches)  # eight of ten: the next batch crosses the border of the epoch
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(2, state, batches.get_state())
    expected = [next(batches) for _ in range(7)]
    checkpoints.close()

    checkpoints = Checkpoints(tmp_path, keep=1)
    _, data_state = checkpoints.restore(2, state, {"x": ON_ONE_DEVICE})
    checkpoints.close()
    again = problem_batches(problems, 4, seed=3)
    again.set_state(data_state)
    assert [next(again) for _ in range(7)] == expected
    assert {problem.id for batch in expected for problem in batch} == {problem.id for problem in problems}


def steps_on_disk(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def save_small(checkpoints, step):
    checkpoints.save(step, {"x": np.full(4, step)}, {"step": step})


def restore_small(checkpoints, step):
    state, data_state = checkpoints.restore(step, {"x": np.zeros(4, int)}, {"x": ON_ONE_DEVICE})
    return np.asarray(state["x"]).tolist(), data_state


def test_the_newest_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest_step is None
    for step in (3, 6, 10):
        save_small(checkpoints, step)
    checkpoints.close()
    assert steps_on_disk(tmp_path) == [6, 10]
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest_step == 10
    assert restore_small(checkpoints, 6) == ([6] * 4, {"step": 6})
    save_small(checkpoints, 11)
    checkpoints.close()
    assert steps_on_disk(tmp_path) == [10, 11]


@pytest.mark.parametrize("suffix", [".orbax-checkpoint-tmp", ".orbax-checkpoint-tmp-1700000000000000"])
def test_a_checkpoint_that_a_crash_cut_short_does_not_count(tmp_path, suffix):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        save_small(checkpoints, step)
    checkpoints.close()
    half = tmp_path / f"2{suffix}"
    (tmp_path / "2").rename(half)
    shutil.rmtree(half / "state")

    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest_step == 1
    assert restore_small(checkpoints, 1) == ([1] * 4, {"step": 1})
    save_small(checkpoints, 2)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest_step == 2
    assert restore_small(checkpoints, 2) == ([2] * 4, {"step": 2})
    checkpoints.close()
