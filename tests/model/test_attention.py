import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poly_epo_jax.model import attention, blockwise
from poly_epo_jax.model.attention import cached_attention, packed_attention
from poly_epo_jax.model.sharding import make_mesh

SHAPES = [(1, 1), (4, 1), (4, 2), (6, 6)]  # query heads, key heads


def random_segments(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Rows of consecutive segments 1, 2, ... of random lengths; what is left at the end is padding."""
    segment_ids = np.zeros((rows, length), np.int32)
    for row in segment_ids:
        start = 0
        for segment in range(1, 4):
            end = start + rng.integers(1, length // 3 + 1)
            row[start:end] = segment
            start = end
    return segment_ids


def random_inputs(rng, rows, length, heads, kv_heads, head_dim):
    shapes = [(rows, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return tuple(rng.standard_normal(shape, np.float32) for shape in shapes)


def attention_reference(q, k, v, visible):
    """softmax(q k' / sqrt(D)) v in float64, one query at a time; visible(b, t) lists the keys that it sees."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(q.shape[:3]):
        keys, kv_head = visible(b, t), h * k.shape[2] // q.shape[2]
        scores = k[b, keys, kv_head] @ q[b, t, h] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ v[b, keys, kv_head] / weights.sum()
    return out


@pytest.mark.parametrize("block", [4, 17, 64])  # 17 tokens: with padding, exactly, and in one block
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_blockwise_matches_a_float64_loop(heads, kv_heads, block, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", block)
    rng = np.random.default_rng(heads)
    segment_ids = random_segments(rng, rows=3, length=17)
    q, k, v = random_inputs(rng, 3, 17, heads, kv_heads, head_dim=6)
    expected = attention_reference(
        q, k, v, lambda b, t: [s for s in range(t + 1) if segment_ids[b, s] == segment_ids[b, t]]
    )
    out = packed_attention(*map(jnp.asarray, (q, k, v, segment_ids)), implementation="blockwise")
    np.testing.assert_allclose(out, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_cached_attention_sees_exactly_its_mask(heads, kv_heads):
    rng = np.random.default_rng(heads)
    q, k, v = random_inputs(rng, 3, 9, heads, kv_heads, head_dim=4)
    q, visible = q[:, :1], rng.random((3, 9)) < 0.5
    visible[:, 4] = True
    expected = attention_reference(q, k, v, lambda b, t: np.flatnonzero(visible[b]))
    out = cached_attention(*map(jnp.asarray, (q[:, 0], k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), visible)))
    np.testing.assert_allclose(out, expected[:, 0], atol=1e-5, rtol=0)


def test_auto_is_blockwise_on_the_cpu():
    rng = np.random.default_rng(0)
    q, k, v = map(jnp.asarray, random_inputs(rng, 1, 9, 2, 1, 4))
    ids = jnp.asarray(random_segments(rng, 1, 9))
    np.testing.assert_array_equal(packed_attention(q, k, v, ids), packed_attention(q, k, v, ids, "blockwise"))


def whole_matrix(q, k, v, segment_ids):
    """The plainest form, whose gradients JAX makes: one matrix of scores."""
    length, groups = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    causal = jnp.tril(jnp.ones((length, length), bool))[None]
    visible = causal & (segment_ids[:, :, None] == segment_ids[:, None, :])
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf)), v)


def output_and_gradients(attend, inputs, segment_ids):
    """The output, and the gradients of a random linear function of its real tokens."""
    weights = np.random.default_rng(1).standard_normal(inputs[0].shape, np.float32)
    weights *= (segment_ids > 0)[:, :, None, None]

    def value(q, k, v):
        out = attend(q, k, v, jnp.asarray(segment_ids))
        return jnp.sum(out * weights), out

    (_, out), gradients = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))(*inputs)
    return [out * (segment_ids > 0)[:, :, None, None], *gradients]


def kernel_inputs():
    """What the kernels take: whole blocks of tokens, heads of 128, one row with padding and one without."""
    rng = np.random.default_rng(0)
    segment_ids = random_segments(rng, rows=2, length=256)
    segment_ids[1, 200:] = 4
    return [jnp.asarray(x) for x in random_inputs(rng, 2, 256, 4, 2, head_dim=128)], segment_ids


def assert_same_as_the_whole_matrix(implementation, inputs, segment_ids, mesh=None, atol=1e-4):
    expected = output_and_gradients(whole_matrix, inputs, segment_ids)
    attend = functools.partial(packed_attention, implementation=implementation)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        found = output_and_gradients(attend, inputs, segment_ids)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=atol, rtol=0)


@pytest.mark.parametrize("block", [8, 32, 64])
@pytest.mark.parametrize("seed", range(3))
def test_blockwise_gradients_are_those_of_the_whole_matrix(block, seed, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", block)
    rng = np.random.default_rng(seed)
    inputs, segment_ids = random_inputs(rng, 2, 61, 4, 2, head_dim=6), random_segments(rng, 2, 61)
    assert_same_as_the_whole_matrix("blockwise", inputs, segment_ids, atol=1e-5)


def test_blockwise_visits_no_keys_before_the_earliest_segment(monkeypatch):
    """Keys that are not numbers would show in the output: their blocks are not even read."""
    monkeypatch.setattr(blockwise, "BLOCK", 8)
    q, k, v = random_inputs(np.random.default_rng(0), 1, 32, 2, 1, head_dim=4)
    segment_ids = np.repeat([[1, 2]], 16, axis=1)
    k[:, :16] = np.nan
    out = packed_attention(*map(jnp.asarray, (q, k, v, segment_ids)), implementation="blockwise")
    assert np.isnan(out[:, :16]).all()
    assert np.isfinite(out[:, 16:]).all()


def test_blockwise_never_holds_the_whole_matrix():
    def temporary_bytes(attend):
        shapes = [(1, 2048, heads, 4) for heads in (4, 2, 2)]
        inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        gradient = jax.grad(lambda q, k, v: attend(q, k, v, jnp.ones((1, 2048), jnp.int32)).sum(), (0, 1, 2))
        memory: Any = jax.jit(gradient).lower(*inputs).compile().memory_analysis()
        return memory.temp_size_in_bytes

    all_scores = 4 * 2048**2 * 4
    assert temporary_bytes(whole_matrix) >= all_scores
    assert temporary_bytes(functools.partial(packed_attention, implementation="blockwise")) < all_scores / 16


@pytest.mark.slow
def test_splash_matches_the_whole_matrix(monkeypatch):
    monkeypatch.setattr(attention, "KERNEL_BLOCK", 128)  # 2 x 2 blocks: one is skipped, and segments cross the others
    assert_same_as_the_whole_matrix("splash", *kernel_inputs())


def test_tokamax_matches_the_whole_matrix():
    pytest.importorskip("tokamax")
    assert_same_as_the_whole_matrix("tokamax", *kernel_inputs())


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("implementation", ["blockwise", "splash"])
def test_under_a_mesh_each_device_runs_the_kernel_on_its_rows_and_heads(implementation, monkeypatch):
    monkeypatch.setattr(attention, "KERNEL_BLOCK", 128)
    assert_same_as_the_whole_matrix(implementation, *kernel_inputs(), make_mesh(data=1, fsdp=2, tensor=2))


def test_lengths_are_padded_to_whole_blocks_for_the_kernels(monkeypatch):
    """Any kernel: the padded tail is cut off again, and nothing in it is seen."""
    monkeypatch.setattr(attention, "KERNEL_BLOCK", 16)
    rng = np.random.default_rng(0)
    q, segment_ids = *random_inputs(rng, 2, 21, 2, 1, 4)[:1], random_segments(rng, 2, 21)
    padded_q, padded_ids = attention._whole_blocks(jnp.asarray(q), jnp.asarray(segment_ids))
    assert padded_q.shape == (2, 32, 2, 4) and padded_ids.shape == (2, 32)
    np.testing.assert_array_equal(padded_q[:, :21], q)
    assert not padded_ids[:, 21:].any() and not padded_q[:, 21:].any()


def test_a_backend_without_a_kernel_is_told_once(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: None)
    attention._fastest.cache_clear()
    with pytest.warns(UserWarning, match="no fast attention kernel for gpu here, so the plain form runs") as warnings:
        assert [attention._fastest() for _ in range(3)] == ["blockwise"] * 3
    assert len(warnings) == 1
    attention._fastest.cache_clear()
