import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packings import (
    devices_elsewhere,
    output_and_gradients,
    random_inputs,
    random_packing,
    shared_packing,
    visible,
    visible_where_shared,
    whole_matrix,
)

from poly_epo_jax.model import attention
from poly_epo_jax.model.attention import (
    IMPLEMENTATIONS,
    blockwise,
    cached_attention,
    packed_attention,
    resolve_implementation,
)
from poly_epo_jax.parallel.sharding import make_mesh

SHAPES = [(1, 1), (4, 1), (4, 2), (6, 6)]  # Number of query heads and key heads.


def compiled_blockwise():
    """Returns a new program, which has the current block size."""
    return jax.jit(functools.partial(packed_attention, implementation="blockwise"))


def attention_reference(q, k, v, visible):
    """Computes softmax(q k' / sqrt(D)) v in float64, one query at a time. `visible(b, t)` returns its visible keys."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(q.shape[:3]):
        keys, kv_head = visible(b, t), h * k.shape[2] // q.shape[2]
        scores = k[b, keys, kv_head] @ q[b, t, h] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ v[b, keys, kv_head] / weights.sum()
    return out


# Rows have 17 tokens, so these blocks require padding, match the row, and exceed it.
@pytest.mark.parametrize(("block", "heads", "kv_heads"), [(4, 4, 2), (4, 1, 1), (17, 4, 1), (64, 6, 6)])
def test_blockwise_matches_a_float64_loop(block, heads, kv_heads, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", block)
    rng = np.random.default_rng(heads)
    segment_ids = random_packing(rng, rows=3, length=17)
    q, k, v = random_inputs(rng, 3, 17, heads, kv_heads, head_dim=6)
    seen = visible(segment_ids)
    expected = attention_reference(q, k, v, lambda b, t: np.flatnonzero(seen[b, t]))
    out = compiled_blockwise()(q, k, v, segment_ids)
    np.testing.assert_allclose(out, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_cached_attention_sees_only_visible_tokens(heads, kv_heads):
    rng = np.random.default_rng(heads)
    q, k, v = random_inputs(rng, 3, 9, heads, kv_heads, head_dim=4)
    q, visible = q[:, :1], rng.random((3, 9)) < 0.5
    visible[:, 4] = True
    expected = attention_reference(q, k, v, lambda b, t: np.flatnonzero(visible[b]))
    out = jax.jit(cached_attention)(q[:, 0], k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), visible)
    np.testing.assert_allclose(out, expected[:, 0], atol=1e-5, rtol=0)


def test_auto_selects_blockwise_on_cpu():
    rng = np.random.default_rng(0)
    arrays = *random_inputs(rng, 1, 9, 2, 1, 4), random_packing(rng, 1, 9)
    auto, of_blockwise, of_triton = (
        str(jax.make_jaxpr(functools.partial(packed_attention, **options))(*arrays))
        for options in ({}, {"implementation": "blockwise"}, {"implementation": "triton"})
    )
    assert auto == of_blockwise != of_triton


@pytest.mark.parametrize("block", [8, 64])
def test_blockwise_gradients_match_the_full_matrix(block, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", block)
    attend = functools.partial(packed_attention, implementation="blockwise")
    for seed in range(3):
        rng = np.random.default_rng(seed)
        inputs, segment_ids = random_inputs(rng, 2, 61, 4, 2, head_dim=6), random_packing(rng, 2, 61)
        expected = output_and_gradients(whole_matrix, inputs, segment_ids)
        for x, y in zip(output_and_gradients(attend, inputs, segment_ids), expected, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("block", "windows"), [(16, (0,)), (8, (1, 7, 100))])
def test_blockwise_with_shared_prompts_and_windows_matches_the_full_matrix(block, windows, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", block)

    def attend(q, k, v, segment_ids, positions, window=0):
        return packed_attention(q, k, v, segment_ids, "blockwise", positions=positions, window=window)

    for seed, window in itertools.product(range(3), windows):
        rng = np.random.default_rng(seed)
        inputs, (segment_ids, positions) = random_inputs(rng, 2, 61, 4, 2, head_dim=6), shared_packing(rng, 2, 61)
        seen = visible_where_shared(segment_ids, positions)
        assert (seen.sum() > visible(segment_ids).sum()) and (positions.max() < 61)
        seen &= positions[:, :, None] - positions[:, None] < (window or 61)
        expected = output_and_gradients(whole_matrix, inputs, segment_ids, jnp.asarray(seen))
        options = [jnp.int32(window)] if window else []
        found = output_and_gradients(attend, inputs, segment_ids, jnp.asarray(positions), *options)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5, rtol=0)


def test_blockwise_skips_keys_between_a_shared_prompt_and_its_segment(monkeypatch):
    """NaN keys would produce NaN outputs if their blocks were read."""
    monkeypatch.setattr(blockwise, "BLOCK", 8)
    q, k, v = random_inputs(np.random.default_rng(0), 1, 48, 2, 1, head_dim=4)
    segment_ids, shared, own = np.repeat([[1, 2, 3]], 16, axis=1), np.arange(16), 16 + np.arange(16)
    positions = np.concatenate([shared, own, own])[None]
    attend = compiled_blockwise()
    k[:, 16:32] = np.nan
    out = attend(q, k, v, segment_ids, positions=positions)
    assert np.isfinite(out[:, :16]).all() and np.isnan(out[:, 16:32]).all() and np.isfinite(out[:, 32:]).all()
    k[:, :8] = np.nan
    out = attend(q, k, v, segment_ids, positions=positions)
    assert np.isnan(out).all()


def test_blockwise_skips_keys_before_the_earliest_segment(monkeypatch):
    """NaN keys would produce NaN outputs if their blocks were read."""
    monkeypatch.setattr(blockwise, "BLOCK", 8)
    q, k, v = random_inputs(np.random.default_rng(0), 1, 32, 2, 1, head_dim=4)
    segment_ids = np.repeat([[1, 2]], 16, axis=1)
    k[:, :16] = np.nan
    out = compiled_blockwise()(q, k, v, segment_ids)
    assert np.isnan(out[:, :16]).all()
    assert np.isfinite(out[:, 16:]).all()


def test_blockwise_does_not_store_the_full_matrix():
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
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_each_device_of_a_mesh_runs_the_kernel_on_its_rows_and_heads(implementation: str):
    rng = np.random.default_rng(0)
    inputs, segment_ids = random_inputs(rng, 2, 256, 4, 2, head_dim=64), random_packing(rng, 2, 256)
    expected = output_and_gradients(whole_matrix, inputs, segment_ids)
    with jax.set_mesh(make_mesh(data=1, fsdp=2, tensor=2)):
        attend = functools.partial(packed_attention, implementation=implementation)
        found = output_and_gradients(attend, inputs, segment_ids)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("device", "expected"), [("cpu", "blockwise"), ("gpu", "triton"), ("tpu", "splash")])
def test_auto_selects_the_kernel_of_the_target_devices(device: str, expected: str, monkeypatch):
    with devices_elsewhere(device):
        assert resolve_implementation("auto") == expected
        assert resolve_implementation("splash") == "splash"
        assert resolve_implementation("auto", has_window=True) == ("triton" if device == "gpu" else "blockwise")
        monkeypatch.setattr(attention, "disabled_kernels", {"triton", "splash"})
        assert resolve_implementation("auto") == "blockwise"
        assert resolve_implementation("splash") == "splash"
