import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import tiny_params
from flax import nnx

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.layer import rms_norm
from poly_epo_jax.model.rope import Rope, make_rotation, rotate
from poly_epo_jax.model.transformer import REMAT_POLICIES, abstract_model, init_params

QWEN3 = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    mlp_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    dtype="float32",
)
FAMILIES = {
    "qwen3": QWEN3,
    "qwen2": dataclasses.replace(QWEN3, qk_norm=False, attention_bias=True),
    "llama": dataclasses.replace(QWEN3, qk_norm=False, tie_word_embeddings=False),
    "qwen3_5": dataclasses.replace(
        QWEN3,
        num_layers=6,
        ropes=(Rope(fraction=0.5),),
        gated_attention=True,
        linear_layers=(True, True, False),
        linear_key_heads=2,
        linear_value_heads=4,
        linear_key_dim=8,
        linear_value_dim=5,
        conv_size=3,
        norm_eps=1e-2,  # The norm of outputs close to 0 would amplify rounding errors.
    ),
}
LENGTHS = (5, 9, 1)
ROW = 16  # Tokens per row: the three sequences and one padding token.


@functools.cache
def random_params(config, seed=0):
    return jax.tree.map(jnp.asarray, tiny_params(seed, abstract_model(config), scale=0.2))


@functools.cache
def graph(config):
    return nnx.split(abstract_model(config))[0]


def build(config, params):
    return nnx.merge(graph(config), params)


@functools.partial(jax.jit, static_argnums=0)
def forward(config, params, batch):
    return build(config, params)(*batch)


@functools.partial(jax.jit, static_argnums=0)
def gradients_and_output(config, params, batch):
    """Returns the gradients of mean(sin(output)), and the output."""

    def loss(params):
        output = build(config, params)(*batch)
        return jnp.mean(jnp.sin(output)), output

    return jax.grad(loss, has_aux=True)(params)


def sequences(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, QWEN3.vocab_size, length) for length in LENGTHS]


def pack(*sequences):
    """Packs the sequences into one row as segments 1, 2, ..., followed by padding."""
    tokens, positions, segment_ids = np.zeros((3, 1, ROW), np.int32)
    start = 0
    for segment, sequence in enumerate(sequences, 1):
        span = slice(start, start + len(sequence))
        tokens[0, span], positions[0, span], segment_ids[0, span] = sequence, np.arange(len(sequence)), segment
        start = span.stop
    return tuple(jnp.asarray(x) for x in (tokens, positions, segment_ids))


def assert_trees_close(found, expected, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-5), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_sequences_do_not_see_each_other(name):
    config = FAMILIES[name]
    params = random_params(config)
    packed = forward(config, params, pack(*sequences()))
    start = 0
    for sequence in sequences():
        alone = forward(config, params, pack(sequence))[:, : len(sequence)]
        np.testing.assert_allclose(packed[:, start : start + len(sequence)], alone, atol=1e-5, rtol=0)
        start += len(sequence)
    assert np.isfinite(packed).all()


def test_later_tokens_do_not_change_earlier_ones():
    params = random_params(QWEN3)
    tokens, positions, segment_ids = pack(np.arange(ROW))
    before = np.asarray(forward(QWEN3, params, (tokens, positions, segment_ids)))
    tokens = np.where(np.arange(ROW)[None] == 9, 29, tokens).astype(np.int32)
    after = np.asarray(forward(QWEN3, params, (tokens, positions, segment_ids)))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (np.abs(before[:, 9:] - after[:, 9:]).max(-1) > 1e-3).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_scanned_and_unrolled_layers_match(name):
    config = FAMILIES[name]
    params, batch = random_params(config), pack(*sequences())
    unrolled = dataclasses.replace(config, scan_unroll=config.num_layers)
    (found, output), (gradients, expected) = (gradients_and_output(one, params, batch) for one in (unrolled, config))
    np.testing.assert_allclose(output, expected, atol=1e-5, rtol=0)
    assert_trees_close(found, gradients, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_remat_policies_give_the_same_gradients(name):
    config = FAMILIES[name]
    params, batch = random_params(config), pack(*sequences())
    gradients = {
        policy: gradients_and_output(dataclasses.replace(config, remat=policy), params, batch)[0]
        for policy in REMAT_POLICIES
    }
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(gradients["none"]))
    for policy in REMAT_POLICIES:
        assert_trees_close(gradients[policy], gradients["none"], atol=1e-5)


def test_a_tied_head_is_the_embedding():
    params = random_params(QWEN3)
    assert "untied_head" not in params
    np.testing.assert_array_equal(build(QWEN3, params).head, params["embed"])
    llama = random_params(FAMILIES["llama"])
    np.testing.assert_array_equal(build(FAMILIES["llama"], llama).head, llama["untied_head"])


def test_types_match_the_config():
    config = dataclasses.replace(QWEN3, dtype="bfloat16")
    params = random_params(config)
    model = build(config, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert jax.eval_shape(forward, config, params, pack()).dtype == "bfloat16"
    assert model.head.dtype == "bfloat16"


def test_initial_logits_have_unit_scale():
    params = jax.jit(init_params, static_argnums=0)(QWEN3)
    logits = forward(QWEN3, params, pack(*sequences())) @ params["embed"].T
    assert 0.5 < float(jnp.std(logits)) < 2


def test_rms_norm_matches_float64():
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 5, 8)), rng.standard_normal(8)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * weight
    found: Any = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), 0.1)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("axes", [(8,), (5, 8)])
def test_gradients_of_rms_norm_match_automatic_differentiation(axes):
    def reference(x, weight, eps):
        return (
            x
            / jnp.sqrt(jnp.mean(x * x, axis=tuple(range(-len(axes), 0)), keepdims=True) + eps)
            * jnp.broadcast_to(weight, x.shape)
        )

    rng = np.random.default_rng(0)
    x, d_out, weight = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((3, 5, 8), (3, 5, 8), axes))

    def gradients(norm):
        return jax.grad(lambda x, weight: jnp.sum(norm(x, weight, 0.1) * d_out), argnums=(0, 1))(x, weight)

    found, expected = gradients(rms_norm), gradients(reference)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_rope_rotates_each_pair_by_its_angle():
    """Elements (i, i + D/2) form a complex number that is rotated by position * theta^(-2i/D)."""
    rng = np.random.default_rng(0)
    x, positions = rng.standard_normal((2, 7, 3, 8)), rng.integers(0, 100, (2, 7))
    rotation = np.exp(1j * positions[:, :, None, None] * 50.0 ** (-np.arange(4) / 4))
    rotated = (x[..., :4] + 1j * x[..., 4:]) * rotation
    found = rotate(jnp.asarray(x, jnp.float32), make_rotation(Rope(50.0), 8, jnp.asarray(positions)))
    np.testing.assert_allclose(found, np.concatenate([rotated.real, rotated.imag], -1), atol=1e-4)
