import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poly_epo_jax.model import attention
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


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_xla_matches_a_float64_loop(heads, kv_heads):
    rng = np.random.default_rng(heads)
    segment_ids = random_segments(rng, rows=3, length=17)
    q, k, v = random_inputs(rng, 3, 17, heads, kv_heads, head_dim=6)
    expected = attention_reference(
        q, k, v, lambda b, t: [s for s in range(t + 1) if segment_ids[b, s] == segment_ids[b, t]]
    )
    out = packed_attention(*map(jnp.asarray, (q, k, v, segment_ids)), implementation="xla")
    np.testing.assert_allclose(out, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_cached_attention_sees_exactly_its_mask(heads, kv_heads):
    rng = np.random.default_rng(heads)
    q, k, v = random_inputs(rng, 2, 9, heads, kv_heads, head_dim=4)
    q, mask = q[:, :3], rng.random((2, 3, 9)) < 0.5
    mask[..., 4] = True
    expected = attention_reference(q, k, v, lambda b, t: np.flatnonzero(mask[b, t]))
    out = cached_attention(*map(jnp.asarray, (q, k, v, mask)))
    np.testing.assert_allclose(out, expected, atol=1e-5, rtol=0)


def test_auto_is_xla_on_the_cpu():
    rng = np.random.default_rng(0)
    q, k, v = map(jnp.asarray, random_inputs(rng, 1, 9, 2, 1, 4))
    ids = jnp.asarray(random_segments(rng, 1, 9))
    np.testing.assert_array_equal(packed_attention(q, k, v, ids), packed_attention(q, k, v, ids, "xla"))


def output_and_gradients(implementation, inputs, segment_ids):
    """The output, and the gradients of a random linear function of its real tokens."""
    weights = np.random.default_rng(1).standard_normal(inputs[0].shape, np.float32)
    weights *= (segment_ids > 0)[:, :, None, None]

    def value(q, k, v):
        out = packed_attention(q, k, v, jnp.asarray(segment_ids), implementation)
        return jnp.sum(out * weights), out

    (_, out), gradients = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))(*inputs)
    return [out * (segment_ids > 0)[:, :, None, None], *gradients]


def kernel_inputs():
    """What the kernels take: whole blocks of tokens, heads of 128, one row with padding and one without."""
    rng = np.random.default_rng(0)
    segment_ids = random_segments(rng, rows=2, length=256)
    segment_ids[1, 200:] = 4
    return [jnp.asarray(x) for x in random_inputs(rng, 2, 256, 4, 2, head_dim=128)], segment_ids


def assert_same_as_xla(implementation, mesh=None):
    inputs, segment_ids = kernel_inputs()
    expected = output_and_gradients("xla", inputs, segment_ids)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        found = output_and_gradients(implementation, inputs, segment_ids)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_splash_matches_xla(monkeypatch):
    monkeypatch.setattr(attention, "KERNEL_BLOCK", 128)  # 2 x 2 blocks: one is skipped, and segments cross the others
    assert_same_as_xla("splash")


def test_tokamax_matches_xla():
    pytest.importorskip("tokamax")
    assert_same_as_xla("tokamax")


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_under_a_mesh_each_device_runs_the_kernel_on_its_rows_and_heads():
    assert_same_as_xla("splash", make_mesh(data=1, fsdp=2, tensor=2))
