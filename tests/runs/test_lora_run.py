"""A run with adapters: resumed after SIGKILL, restored, exported, and used with a missing or another base policy."""

import json
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fork_server import ForkServer
from safetensors.numpy import load_file
from training_runs import Run, rows_of

from poly_epo_jax.config.keys import ModelSection
from poly_epo_jax.export import __main__ as export
from poly_epo_jax.model.hf import load_params, read_model_config
from poly_epo_jax.model.lora import split_adapter
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.records.run_folder import read_about
from poly_epo_jax.startup.trained_policy import open_trained_policy

pytestmark = pytest.mark.slow

LAST_STEP = 8
CHANGES = {
    "lora.rank": 4,
    "sampling.correlated": True,  # the points of a group must be the same after a restart
    "algo.kl_coef": 0.01,
    "train.num_steps": LAST_STEP,
    "train.prompts_per_minibatch": 8,  # one update per step
    "checkpoint.every": 3,
    "eval.every": 4,
    "optimizer.learning_rate": 5e-3,
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, caches: dict[str, Path], fork_server: ForkServer) -> Run:
    run = Run(tmp_path_factory.mktemp("lora"), "uninterrupted", CHANGES | caches, server=fork_server)
    run.finish()
    return run


def test_the_adapter_trains(uninterrupted: Run):
    rows = rows_of(uninterrupted.folder)
    assert [row["step"] for row in rows] == list(range(1, LAST_STEP + 1))
    assert sum(row["policy/update_norm"] > 0 for row in rows) > LAST_STEP / 2
    assert rows[-1]["policy/weight_norm"] != rows[0]["policy/weight_norm"]
    # New adapters have no effect, so the first policy is the reference.
    assert rows[0]["policy/reference_kl"] < 1e-6 < rows[-1]["policy/reference_kl"]


def test_a_killed_and_resumed_run_writes_the_same_bytes(uninterrupted: Run, fork_server: ForkServer):
    interrupted = Run(uninterrupted.folder.parent, "interrupted", uninterrupted.changes, server=fork_server)
    assert interrupted.stop("push 5", signal.SIGKILL) == [-signal.SIGKILL]
    assert interrupted.checkpoints() == [3]
    interrupted.finish()
    for name in ("metrics.jsonl", "generations.jsonl"):
        assert interrupted.bytes(name) == uninterrupted.bytes(name)
    jax.tree.map(np.testing.assert_array_equal, interrupted.params(), uninterrupted.params())


def test_checkpoints_contain_only_the_adapter(uninterrupted: Run):
    checkpoint = uninterrupted.folder / "checkpoints" / str(LAST_STEP)
    policy, params, _ = open_trained_policy(uninterrupted.folder, ModelSection(), make_mesh(1, 1, 1))
    adapter, base = split_adapter(policy.config, params)
    names = json.loads((checkpoint / "state" / "_METADATA").read_text())["tree_metadata"]
    assert any("q_lora_a" in name for name in names) and not any("'embed'" in name for name in names)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(adapter))
    saved = load_params(read_about(uninterrupted.folder)["base"], policy.config)
    jax.tree.map(np.testing.assert_array_equal, base, saved)


def test_exports_have_the_logits_of_the_policy(uninterrupted: Run, tmp_path: Path):
    assert export.main([str(uninterrupted.folder), str(tmp_path / "merged"), "--dtype", "float32"]) == 0
    assert export.main([str(uninterrupted.folder), str(tmp_path / "adapter"), "--adapter"]) == 0
    policy, params, _ = open_trained_policy(uninterrupted.folder, ModelSection(), make_mesh(1, 1, 1))
    merged = read_model_config(tmp_path / "merged", dtype="float32")
    tokens = jnp.arange(3, 11)[None]

    def logits(config, params):
        model = nnx.merge(nnx.split(abstract_model(config))[0], params)
        return model(tokens, jnp.arange(8)[None], jnp.ones_like(tokens)) @ model.head.T

    expected = logits(policy.config, params)
    np.testing.assert_allclose(logits(merged, load_params(tmp_path / "merged", merged)), expected, rtol=0, atol=1e-4)
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == read_about(uninterrupted.folder)["base"]
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    np.testing.assert_array_equal(
        tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"], params["layers"]["down_lora_a"][0].T
    )


def test_a_missing_or_other_base_policy_is_reported(
    uninterrupted: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted.folder, run)
    base = Path(read_about(run)["base"])
    about = read_about(run) | {"base": str(tmp_path / "missing")}
    (run / "about.json").write_text(json.dumps(about))
    assert export.main([str(run), str(tmp_path / "policy")]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path / "missing") in message and "--base" in message
    assert export.main([str(run), str(tmp_path / "policy"), "--base", str(base)]) == 0
    shutil.copytree(base, tmp_path / "other")
    # Another base policy with the same shapes is rejected.
    other = tmp_path / "policy"
    assert export.main([str(run), str(tmp_path / "wrong"), "--base", str(other)]) == 2
    message = capsys.readouterr().err
    assert str(run / "checkpoints") in message and "base policy" in message and "model.path" in message
