"""Compares model FLOPs with manual counts and with the weights of the model."""

import dataclasses

import jax
import numpy as np
import pytest

from poly_epo_jax.model import flops
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.presets import PRESETS, has_preset, preset_config
from poly_epo_jax.model.transformer import abstract_model, param_shapes
from poly_epo_jax.parallel.mesh import AXES

CONFIG = ModelConfig(50, 6, 10, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)
BILLIONS = {
    "Qwen3-0.6B": 0.596,
    "Qwen3-1.7B": 1.72,
    "Qwen3-4B": 4.02,
    "Qwen3-8B": 8.19,
    "Qwen3-14B": 14.77,
    "Qwen3-32B": 32.76,
    "Qwen3-30B-A3B": 30.53,
}


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_total_weights_counts_the_matrices_of_the_model(tie_word_embeddings):
    config = ModelConfig(
        50, 6, 10, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, tie_word_embeddings=tie_word_embeddings
    )
    leaves = jax.tree.leaves_with_path(param_shapes(abstract_model(config)))
    matrices = sum(leaf.size for path, leaf in leaves if "norm" not in jax.tree_util.keystr(path))
    assert flops.total_weights(config) == matrices


def test_forward_flops_match_a_manual_count():
    """Two sequences of 2 + 1 and 1 + 2 tokens: 6 tokens through the layers, 3 through the head, 12 query-key pairs."""
    per_token = 3 * (6 * 32 + 2 * 6 * 16 + 32 * 6 + 3 * 6 * 10)
    expected = 2 * 6 * per_token + 3 * 2 * 2 * 32 * 12 + 2 * 3 * 50 * 6
    assert flops.forward_flops(CONFIG, np.array([2, 1]), np.array([1, 2])) == expected


@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_windows_limit_attention_and_cache(window):
    """One of three layers has a window."""
    config, lengths = dataclasses.replace(CONFIG, windows=(0, window, 0)), np.array([5, 8])
    pairs = sum(min(position + 1, window) - (position + 1) for length in lengths for position in range(length))
    difference = flops.forward_flops(config, lengths, lengths * 0) - flops.forward_flops(CONFIG, lengths, lengths * 0)
    assert difference == 4 * CONFIG.num_heads * CONFIG.head_dim * pairs
    assert flops.cache_bytes(config, 5, 4) == 2 * (10 + min(5, window)) * CONFIG.num_kv_heads * CONFIG.head_dim * 4


def test_cache_bytes_of_qwen3_4b():
    config = preset_config("Qwen/Qwen3-4B-Base")
    assert flops.cache_bytes(config, 1, 2) == 147_456


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_sizes(name):
    config = preset_config(f"Qwen/{name}-Base", dtype="float32")
    assert config.dtype == "float32"
    assert flops.total_weights(config) / 1e9 == pytest.approx(BILLIONS[name], rel=0.005)


def test_mixtures_count_only_active_experts():
    config = preset_config("Qwen/Qwen3-30B-A3B")
    active = (
        flops.total_weights(config)
        - flops.weights_per_device(config, dict.fromkeys(AXES, 1), of_layers=True)
        + flops.active_weights(config)
    )
    assert active / 1e9 == pytest.approx(3.35, rel=0.005)
    one_token = np.array([1]), np.array([0])
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    assert flops.forward_flops(config, *one_token) == 2 * flops.active_weights(config) + attention
    mesh = {"data": 1, "fsdp": 2, "tensor": 1, "expert": 4}
    experts = (3 * 2048 * 768 + 2048) * 128 * config.num_layers  # MLPs and routers
    others = flops.total_weights(config) - experts
    assert flops.weights_per_device(config, mesh) == experts / 8 + others / 2


def test_other_names_have_no_preset():
    assert has_preset("Qwen/Qwen3-8B") and not has_preset("meta-llama/Llama-3.1-8B")
