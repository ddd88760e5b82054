"""Tests that decoding one token at a time matches the packed forward pass for all families and cache lengths."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_layer import FAMILIES, QWEN3, build, forward, pack, random_params

from poly_epo_jax.model import decoding, layer

LENGTHS, TOTAL = (5, 8, 1), 9  # Prompt lengths, and the number of tokens of each row.
prefill = jax.jit(decoding.prefill, static_argnums=0)
decode = jax.jit(decoding.decode, static_argnums=0)
decoding_weights = jax.jit(decoding.decoding_weights, static_argnums=0)


def decoded(config, params, tokens, cache_length):
    """Computes logits [rows, position, V] after each token from the last prompt token onwards."""
    weights = decoding_weights(config, params)
    valid = np.arange(8)[None] < np.array(LENGTHS)[:, None]
    prompts = prefill(config, weights, jnp.asarray(np.where(valid, tokens[:, :8], 0)), jnp.asarray(valid))
    cache = decoding.init_cache(config, len(LENGTHS) + 1, cache_length)
    cache = cache.with_rows(jnp.array([3, 1, 0, 9]), prompts, jnp.array([0, 1, 2, 0]))  # Row 9 does not exist.
    rows = np.array([3, 1, 0])
    logits = np.zeros((len(LENGTHS), TOTAL, config.vocab_size), np.float32)
    positions, now, active = np.zeros(4, np.int32), np.zeros(4, np.int32), jnp.arange(4) != 2
    for step in range(TOTAL):
        position = np.minimum(np.array(LENGTHS) - 1 + step, TOTAL - 1)
        is_new = np.array(LENGTHS) - 1 + step < TOTAL  # Rows that are complete repeat their last token.
        positions[rows], now[rows] = position, tokens[np.arange(3), position]
        found, cache = decode(config, weights, jnp.asarray(now), jnp.asarray(positions), active, cache)
        logits[is_new, position[is_new]] = np.asarray(found).T[rows[is_new]]
    return logits


@functools.cache
def make_case(name):
    config = FAMILIES[name]
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (len(LENGTHS), TOTAL))
    return config, random_params(config), tokens


def assert_matches_packed_forward(config, params, tokens, logits, atol):
    head = np.asarray(build(config, params).head, np.float32)
    for row, length in enumerate(LENGTHS):
        hidden = forward(config, params, pack(tokens[row]))[0, :TOTAL]
        expected = np.asarray(hidden, np.float32) @ head.T
        assert expected.std() > 0.3
        np.testing.assert_allclose(logits[row, length - 1 :], expected[length - 1 :], atol=atol, rtol=0)


def test_decoding_after_linear_attention_and_a_window_matches_the_packed_forward_pass():
    """The window of three tokens is shorter than two prompts, and padding follows two prompts."""
    config = dataclasses.replace(FAMILIES["qwen3_5"], num_layers=2, linear_layers=(True, False), windows=(0, 3))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (len(LENGTHS), TOTAL))
    params = random_params(config)
    assert_matches_packed_forward(config, params, tokens, decoded(config, params, tokens, TOTAL), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cache_length"), [*((name, TOTAL) for name in FAMILIES), ("qwen3", TOTAL + 7), ("qwen3_5", TOTAL + 7)]
)
def test_decoding_matches_the_packed_forward_pass(name, cache_length):
    config, params, tokens = make_case(name)
    logits = decoded(config, params, tokens, cache_length)
    assert_matches_packed_forward(config, params, tokens, logits, atol=2e-5)


@pytest.mark.slow
def test_another_mlp_is_defined_once_for_training_and_decoding(monkeypatch):
    monkeypatch.setitem(layer.ACTIVATIONS, "squared_relu", lambda x: jnp.square(jax.nn.relu(x)))
    config, params, tokens = make_case("qwen3")
    silu = decoded(config, params, tokens, TOTAL)
    config = dataclasses.replace(config, activation="squared_relu")
    logits = decoded(config, params, tokens, TOTAL)
    assert np.abs(logits - silu).max() > 0.1
    assert_matches_packed_forward(config, params, tokens, logits, atol=2e-5)


@pytest.mark.slow
def test_decoding_in_bfloat16():
    config, params, tokens = make_case("qwen3")
    config = dataclasses.replace(config, dtype="bfloat16")
    assert_matches_packed_forward(config, params, tokens, decoded(config, params, tokens, TOTAL), atol=0.1)
    weights = decoding_weights(config, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype("bfloat16")}
    assert "embed" not in weights  # The tied head is also the embedding.
    assert decoding.init_cache(config, 1, 4).k[0].dtype == "bfloat16"


@pytest.mark.parametrize("length", [3, 6, 11])
def test_resizing_a_cache_truncates_or_pads(length):
    rng = np.random.default_rng(0)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), decoding.init_cache(QWEN3, 2, 6))
    resized, kept = cache.resized(length), min(length, 6)
    assert resized.length == length
    for k, v, old_k, old_v in zip(resized.k, resized.v, cache.k, cache.v, strict=True):
        np.testing.assert_array_equal(k[..., :kept], old_k[..., :kept])
        np.testing.assert_array_equal(v[:, :, :kept], old_v[:, :, :kept])
        assert not k[..., kept:].any() and not v[:, :, kept:].any()
