"""Applies a saved adapter to a transformers model as PEFT does: W + (lora_alpha / r) lora_B lora_A."""

import dataclasses
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from adapted import ADAPTED, adapted_params
from flax import nnx
from safetensors.numpy import load_file

from poly_epo_jax.model.architectures import ARCHITECTURES
from poly_epo_jax.model.hf import save_pretrained
from poly_epo_jax.model.lora import split_adapter, without_adapter
from poly_epo_jax.model.peft import PREFIX, save_adapter
from poly_epo_jax.model.transformer import abstract_model, declared_weights

TOKENS = np.random.default_rng(0).integers(0, ADAPTED.vocab_size, (2, 9))


def test_saved_adapters_have_names_shapes_and_config_of_peft(tmp_path):
    save_adapter(tmp_path / "adapter", adapted_params(), ADAPTED, "Qwen/base")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    module = f"{PREFIX}model.layers.1.self_attn.q_proj"
    assert tensors[f"{module}.lora_A.weight"].shape == (3, 16) and tensors[f"{module}.lora_B.weight"].shape == (32, 3)
    assert len(tensors) == 2 * 7 * ADAPTED.num_layers
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float32)}
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (3, 6.0)
    assert described["target_modules"] == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ]
    assert described["base_model_name_or_path"] == "Qwen/base" and described["peft_type"] == "LORA"
    with pytest.raises(FileExistsError, match="already exists"):
        save_adapter(tmp_path / "adapter", adapted_params(), ADAPTED, "Qwen/base")


LINEAR = {
    "num_layers": 4,
    "linear_layers": (True, False, True, False),
    "linear_key_heads": 2,
    "linear_value_heads": 4,
    "linear_key_dim": 8,
    "linear_value_dim": 6,
    "conv_size": 4,
}


def save_base_and_adapter(folder, family, fields):
    """Writes a base model and an adapter. Returns the configuration and the weights of both together."""
    config = dataclasses.replace(ADAPTED, family=family, **ARCHITECTURES[family].switches, head_dim=4, **fields)
    params = _params(config)
    save_pretrained(folder / "base", split_adapter(config, params)[1], without_adapter(config), dtype="float32")
    save_adapter(folder / "adapter", params, config, str(folder / "base"))
    return config, params


families = pytest.mark.parametrize(
    ("family", "fields"), [("qwen3", {}), ("qwen2", {}), ("llama", {}), ("qwen3_5_text", LINEAR)], ids=str
)


@families
def test_the_adapter_of_a_base_model_gives_the_merged_model(tmp_path, family, fields):
    config, params = save_base_and_adapter(tmp_path, family, fields)
    save_pretrained(tmp_path / "merged", params, config, dtype="float32")
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    modules = {name.rsplit(".lora_")[0] for name in adapter}
    changed = {f"{module.removeprefix(PREFIX)}.weight": module for module in modules}
    assert changed.keys() == {name for name in base if np.abs(merged[name] - base[name]).max() > 0.1}
    for name, module in changed.items():
        a, b = (adapter[f"{module}.lora_{part}.weight"] for part in "AB")
        base[name] += described["lora_alpha"] / described["r"] * b @ a
    for name, weight in merged.items():
        np.testing.assert_allclose(weight, base[name], rtol=0, atol=1e-6)


@pytest.mark.slow
@families
def test_transformers_with_the_adapter_gives_the_same_logits(tmp_path, family, fields):
    torch = _torch()
    config, params = save_base_and_adapter(tmp_path, family, fields)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    modules = {name.rsplit(".lora_")[0] for name in tensors}
    with torch.no_grad():
        before = model(torch.from_numpy(TOKENS)).logits.numpy()
        for module in modules:
            a, b = (torch.from_numpy(tensors[f"{module}.lora_{part}.weight"]) for part in "AB")
            weight = model.get_submodule(module.removeprefix(PREFIX)).weight
            weight += described["lora_alpha"] / described["r"] * b @ a
        expected = model(torch.from_numpy(TOKENS)).logits.numpy()

    policy = nnx.merge(nnx.split(abstract_model(config))[0], jax.tree.map(jnp.asarray, params))
    tokens = jnp.asarray(TOKENS, jnp.int32)
    hidden = policy(tokens, jnp.broadcast_to(jnp.arange(9)[None], tokens.shape), jnp.ones_like(tokens))
    assert np.abs(before - expected).max() > 0.1
    np.testing.assert_allclose(hidden @ policy.head.T, expected, rtol=0, atol=1e-4)


def _params(config):
    rng = np.random.default_rng(0)
    flat = {path: rng.standard_normal(param.shape) for path, param in declared_weights(config).items()}
    scaled = {path: (1.0 if "norm" in path else 0.0) + 0.3 * noise for path, noise in flat.items()}
    params: dict[str, Any] = {path: x.astype(np.float32) for path, x in scaled.items() if "." not in path}
    for path, x in scaled.items():
        stack, _, name = path.rpartition(".")
        if stack:
            params.setdefault(stack, {})[name] = x.astype(np.float32)
    return params


def _torch():
    if not os.environ.get("POLY_EPO_REQUIRE_TORCH"):
        pytest.importorskip(
            "torch", reason="torch is not installed; run bash launch/test.sh all, which installs it for CPUs"
        )
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    return torch
