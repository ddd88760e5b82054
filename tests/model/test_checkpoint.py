"""A checkpoint restores exactly the saved bits, on any mesh."""

import errno
import functools
import json
import resource
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from fakes import TINY_MODEL, optimizer_config, tiny_params

from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.model.checkpoint import CheckpointError, Checkpoints, _other_arrays, _same_content
from poly_epo_jax.model.fingerprint import fingerprints
from poly_epo_jax.model.partition import merge_params
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.set_rl import policy_gradient_loss
from poly_epo_jax.step.objective import UpdateObjective
from poly_epo_jax.step.update import PolicyUpdate

needs_eight_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
ON_ONE_DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@functools.cache
def make_update(*axes, trainable=""):
    config = optimizer_config(schedule="linear", warmup_updates=2)
    objective = UpdateObjective(policy_gradient_loss)
    return PolicyUpdate(TINY_MODEL, make_mesh(*axes), objective, config, total_updates=9, trainable=trainable)


def random_state(update, seed=0):
    """Draws a state with random weights, moments and counters."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        drawn = rng.integers(1, 1000, leaf.shape) if leaf.dtype == np.int32 else rng.standard_normal(leaf.shape)
        return np.asarray(drawn, leaf.dtype)

    return jax.device_put(jax.tree.map(draw, update.abstract_state), update.shardings)


def assert_trees_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
@needs_eight_devices
def test_a_state_is_restored_on_other_meshes(tmp_path):
    update = make_update(2, 2, 2)
    state = random_state(update)
    assert len(jax.tree.leaves(state)) > 3 * len(jax.tree.leaves(tiny_params()))
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(5, state, {"position": 3})
    checkpoints.close()
    for axes in ((1, 8, 1), (1, 1, 1)):
        onto = make_update(*axes)
        checkpoints = Checkpoints(tmp_path, keep=2)
        assert checkpoints.steps[-1] == 5
        restored, data_state = checkpoints.restore(5, onto.abstract_state, onto.shardings)
        checkpoints.close()
        assert_trees_equal(restored, state)
        assert jax.tree.map(lambda leaf: leaf.sharding, restored) == onto.shardings
        assert data_state == {"position": 3}


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(1, 1, 1), pytest.param((2, 2, 2), marks=needs_eight_devices)])
def test_donating_arrays_after_save_does_not_change_the_checkpoint(tmp_path, axes):
    update = make_update(*axes)
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 + 7, state), donate_argnums=0)
    donated = random_state(update)
    overwrite(donated)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
    saved, checkpoints = {}, Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        state = random_state(update, step)
        saved[step] = jax.tree.map(np.array, state)
        checkpoints.save(step, state, {})
        overwritten = overwrite(state)
        assert all((np.asarray(leaf) == 7).all() for leaf in jax.tree.leaves(overwritten))
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, expected in saved.items():
        assert_trees_equal(checkpoints.restore(step, update.abstract_state, update.shardings)[0], expected)
    checkpoints.close()


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["", r"layers\..*"], ids=["all", "part"])
def test_restore_params_returns_all_weights(tmp_path, pattern):
    update = make_update(1, 1, 1, trainable=pattern)
    state, checkpoints = random_state(update), Checkpoints(tmp_path)
    checkpoints.save(3, state, {})
    checkpoints.close()
    shardings = merge_params(update.shardings.trainable, update.shardings.frozen)
    restored = Checkpoints(tmp_path).restore_params(3, update.abstract_state.params, shardings, pattern)
    assert_trees_equal(restored, state.params)


@pytest.mark.slow
def test_a_checkpoint_without_frozen_weights_requires_the_same_frozen_weights(tmp_path):
    pattern = r"layers\.(q|o)"
    update = make_update(1, 1, 1, trainable=pattern)
    state, checkpoints = random_state(update), Checkpoints(tmp_path, base=tmp_path / "base")
    checkpoints.save(3, state, {"position": 3})
    checkpoints.close()
    with ocp.CheckpointManager(tmp_path) as manager:
        saved = manager.restore(3, args=ocp.args.Composite(state=ocp.args.StandardRestore())).state
    assert set(saved["trainable"]["layers"]) == {"q", "o"} and not saved["frozen"]
    checkpoints, like = Checkpoints(tmp_path, base=tmp_path / "base"), (update.abstract_state, update.shardings)
    restored, data_state = checkpoints.restore(3, *like, state.frozen)
    assert_trees_equal(restored, state)
    assert data_state == {"position": 3}
    shardings = merge_params(update.shardings.trainable, update.shardings.frozen)
    weights = Checkpoints(tmp_path, read_only=True).restore_params(
        3, update.abstract_state.params, shardings, pattern, state.frozen
    )
    assert_trees_equal(weights, state.params)
    other = state.frozen | {"norm": state.frozen["norm"] + 1}
    with pytest.raises(ConfigError, match=r"other frozen weights than those in \S+/base; .* model\.path"):
        checkpoints.restore_latest(lambda step: checkpoints.restore(step, *like, other))
    checkpoints.close()


def steps_on_disk(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def save_small(checkpoints, step):
    checkpoints.save(step, {"x": np.full(4, step)}, {"step": step})


def restore_small(checkpoints, step):
    state, data_state = checkpoints.restore(step, {"x": np.zeros(4, int)}, {"x": ON_ONE_DEVICE})
    return np.asarray(state["x"]).tolist(), data_state


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert not checkpoints.steps
    for step in (3, 6, 10):
        save_small(checkpoints, step)
    checkpoints.close()
    assert steps_on_disk(tmp_path) == [6, 10]
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.steps[-1] == 10
    assert restore_small(checkpoints, 6) == ([6] * 4, {"step": 6})
    save_small(checkpoints, 11)
    checkpoints.close()
    assert steps_on_disk(tmp_path) == [10, 11]


def test_the_best_checkpoint_is_kept_beside_the_newest_ones(tmp_path):
    """Compares with a search over all saved steps. Ties keep the earlier step, and steps without a value count as none.

    The checkpoints are opened again in the middle, as by a resumed run, with the values in another order.
    """
    values = {step: value for step, value in enumerate([1.0, 3.0, None, 3.0, 2.0, None, 4.0, 4.0, -1.0], 1) if value}
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in range(1, 10):
        if step == 5:
            checkpoints.close()
            checkpoints = Checkpoints(tmp_path, keep=1)
            checkpoints.values |= reversed([item for item in values.items() if item[0] < 5])
        earlier = {one: value for one, value in values.items() if one < step}
        checkpoints.values |= {step: values[step]} if step in values else {}
        assert checkpoints.is_best(step) == (step in values and values[step] > max(earlier.values(), default=-9))
        save_small(checkpoints, step)
        best = min((one for one in values if one <= step), key=lambda one: (-values[one], one))
        assert steps_on_disk(tmp_path) == sorted({step, best})
    checkpoints.close()


@pytest.mark.slow
def test_incomplete_checkpoints_are_ignored(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        save_small(checkpoints, step)
    checkpoints.close()
    for step, suffix in ((2, ".orbax-checkpoint-tmp"), (3, ".orbax-checkpoint-tmp-1700000000000000")):
        half = tmp_path / f"{step}{suffix}"
        (tmp_path / str(step)).rename(half)
        shutil.rmtree(half / "state")

    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.steps[-1] == 1
    assert restore_small(checkpoints, 1) == ([1] * 4, {"step": 1})
    save_small(checkpoints, 2)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.steps[-1] == 2
    assert restore_small(checkpoints, 2) == ([2] * 4, {"step": 2})
    checkpoints.close()


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_a_corrupted_newest_checkpoint_is_moved_and_saved_again(tmp_path, capsys):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    for step in (3, 6, 9):
        save_small(checkpoints, step)
    checkpoints.close()
    (tmp_path / "checkpoints" / "6" / "data" / "metadata").write_text("")
    for file in (tmp_path / "checkpoints" / "9" / "state").rglob("d/*"):
        flip(file)

    reader = Checkpoints(tmp_path / "checkpoints", read_only=True)
    assert reader.restore_latest(lambda step: restore_small(reader, step)) == (3, ([3] * 4, {"step": 3}))
    assert steps_on_disk(tmp_path / "checkpoints") == [3, 6, 9] and reader.num_corrupted == 0

    capsys.readouterr()
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    assert checkpoints.restore_latest(lambda step: restore_small(checkpoints, step)) == (3, ([3] * 4, {"step": 3}))
    nine, six = capsys.readouterr().err.splitlines()
    assert nine.startswith(f"Warning: Checkpoint {tmp_path}/checkpoints/9 is corrupted: ")
    assert six.startswith(f"Warning: Checkpoint {tmp_path}/checkpoints/6 is corrupted: ")
    assert six.endswith(" Resuming from step 3.")
    assert steps_on_disk(tmp_path / "checkpoints.corrupted") == [6, 9] and checkpoints.num_corrupted == 2
    save_small(checkpoints, 6)
    checkpoints.close()
    assert Checkpoints(tmp_path / "checkpoints").restore_latest(lambda step: step) == (6, 6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder with the small checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(folder)
    save_small(checkpoints, 3)
    checkpoints.close()
    return folder


@pytest.fixture(scope="module")
def reader(saved):
    return Checkpoints(saved)


def test_a_changed_record_is_detected(tmp_path, saved):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    checkpoints, file = Checkpoints(tmp_path), tmp_path / "3" / "data" / "metadata"
    content = json.loads(file.read_text())
    for change in ({"data": {"step": 4}}, {"fingerprints": {"x": 1}}, {"digest": "0"}):
        file.write_text(json.dumps(content | change))
        with pytest.raises(CheckpointError, match=r"All checkpoints in \S+ are corrupted\. .* or delete the run"):
            checkpoints.restore_latest(lambda step: restore_small(checkpoints, step))
        assert steps_on_disk(tmp_path) == [3]


def test_an_invalid_record_is_corrupted(tmp_path, saved):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    checkpoints = Checkpoints(tmp_path)
    for record in ([], None, {}, {"digest": "0"}, {"data": {}, "fingerprints": {}}):
        (tmp_path / "3" / "data" / "metadata").write_text(json.dumps(record))
        with pytest.raises(CheckpointError, match="3 is corrupted"):
            restore_small(checkpoints, 3)


def caused_by(cause):
    error = RuntimeError("reading failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (
            RuntimeError("decompression failed\nand much more"),
            CheckpointError,
            r"3 is corrupted: decompression failed\.$",
        ),
        (KeyError("x"), CheckpointError, "3 is corrupted"),
        (FileNotFoundError(errno.ENOENT, "gone"), CheckpointError, "3 is corrupted: No such file or directory"),
        (OSError(errno.EMFILE, "any text"), OSError, "/3: Too many open files"),
        (RuntimeError(f"[os_error_code='{errno.ESTALE}']"), OSError, "/3: Stale file handle"),
        (OSError(errno.ETIMEDOUT, "any text"), OSError, "/3: Connection timed out"),
        (RuntimeError(f"[os_error_code='{errno.EIO}']"), OSError, "/3: Input/output error"),
        (MemoryError(), OSError, "/3: Cannot allocate memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore"), OSError, "/3: RESOURCE_EXHAUSTED: Out of memory"),
        (caused_by(MemoryError()), OSError, "/3: Cannot allocate memory"),
        (caused_by(KeyError("x")), CheckpointError, "3 is corrupted: reading failed"),
    ],
)
def test_read_errors_are_corruption_or_transient(reader, monkeypatch, error, raised, message):
    def restore(*_, **__):
        raise error

    monkeypatch.setattr(ocp.CheckpointManager, "restore", restore)
    with pytest.raises(raised, match=message) as found:
        reader._read(3)
    assert len(str(found.value).splitlines()) == 1 and isinstance(found.value, CheckpointError | OSError)


@pytest.mark.parametrize("where", [(0, 0), (1, 2)])
def test_a_changed_bit_is_detected(where):
    saved = fingerprints({"a": np.ones((2, 3), np.float32), "b": np.ones(2, np.float32)})
    assert _same_content({"a": np.ones((2, 3), np.float32)}, saved)
    changed = np.ones((2, 3), np.float32)
    changed[where] = np.nextafter(changed[where], np.float32(2))
    assert not _same_content({"a": changed}, saved) and not _same_content({"c": np.ones(2, np.float32)}, saved)


def test_only_arrays_of_requested_subtrees_are_compared():
    tree = {"trainable": {"q": 0, "o": 0}}
    assert _other_arrays(tree, ["trainable.o", "trainable.q", "frozen.k", "opt_state.0"]) == []
    assert _other_arrays(tree, ["trainable.q", "trainable.v", "frozen.k"]) == ["trainable.o", "trainable.v"]


@pytest.mark.parametrize(("saved", "other"), [(["m", "v", "count"], "count"), (["v"], "m")])
def test_a_checkpoint_of_another_version_is_rejected_but_not_corrupted(tmp_path, saved, other):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"moments": {name: np.ones(2) for name in saved}}, {})
    like = {"moments": {name: jax.ShapeDtypeStruct((2,), float) for name in ("m", "v")}}
    shardings = jax.tree.map(lambda _: ON_ONE_DEVICE, like)
    differs = rf"3 was saved by another version of poly_epo_jax: moments\.{other} differ"
    with pytest.raises(ConfigError, match=differs):
        checkpoints.restore_latest(lambda step: checkpoints.restore(step, like, shardings))
    assert steps_on_disk(tmp_path) == [3]
    checkpoints.close()


@pytest.mark.slow
def test_a_transient_read_error_is_not_corruption(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    for step in (3, 6):
        save_small(checkpoints, step)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path)

    def restore(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(ocp.CheckpointManager, "restore", restore)
        with pytest.raises(OSError, match=r"read checkpoint \S+/6: Too many open files\. .* rerun the command"):
            checkpoints.restore_latest(lambda step: restore_small(checkpoints, step))
    assert checkpoints.restore_latest(lambda step: restore_small(checkpoints, step)) == (6, ([6] * 4, {"step": 6}))


@pytest.mark.slow
def test_a_full_disk_preserves_earlier_checkpoints(tmp_path, capfd):
    """Simulates a full disk with a limit of the file size."""
    checkpoints = Checkpoints(tmp_path)
    save_small(checkpoints, 1)
    limits, large = resource.getrlimit(resource.RLIMIT_FSIZE), np.random.default_rng(0).standard_normal((300, 300))
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"write a checkpoint to \S+: File too large\. .* Rerun the command") as error:
            checkpoints.save(2, {"x": large}, {})
            checkpoints.close()
        assert len(str(error.value).splitlines()) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capfd.readouterr().err == ""
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore_latest(lambda step: restore_small(checkpoints, step)) == (1, ([1] * 4, {"step": 1}))
    assert not list(tmp_path.glob("*tmp*"))  # The incomplete checkpoint was removed.
