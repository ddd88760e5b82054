"""Attention for GPUs in Pallas Triton (FlashAttention-2, Dao 2023), which skips other sequences in both passes.

Each kernel instance processes a block of queries and visits the blocks of keys from the start of its first segment to
itself. For the gradients of keys and values, it processes a block of keys and visits the blocks of queries that see it.
Each output block is written by a single instance, so results are deterministic. Scores are scaled for base-2
exponentials, which are the fastest.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton
from jaxtyping import Array, Float

from poly_epo_jax.model.attention.segments import MASK_VALUE, Segments, pad_to_blocks
from poly_epo_jax.parallel.sharding import platform


class Blocks(NamedTuple):
    """Block sizes of a kernel.

    Attributes:
      own: Tokens of the block that an instance processes.
      step: Tokens of the blocks that it visits. Divides `own`.
      warps: Number of warps.
    """

    own: int
    step: int
    warps: int


# Keyed by bytes per value. A thread has 255 registers. At head width 128, the float32 accumulators (one [own, width] in
# the forward pass, two for the gradients of keys and values) take at most 128 of them.
FORWARD = {2: Blocks(128, 64, 8), 4: Blocks(64, 32, 4)}
BACKWARD = {2: Blocks(64, 64, 4), 4: Blocks(32, 32, 4)}
MIN_WIDTH = 16  # Minimum matrix width for matmuls in Triton, whose sizes must be powers of two.


def triton_attention(
    q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], segments: Segments
) -> Float[Array, "B T H D"]:
    """Implements `packed_attention` on GPUs. On CPUs, the kernels are interpreted, which is slow.

    Matmuls of float32 inputs use TF32, as in XLA.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      segments: Visible tokens of each token. Shared prompts are not supported.

    Returns:
      The outputs of all query heads.
    """
    length, width, block = q.shape[1], q.shape[3], FORWARD[q.dtype.itemsize].own
    padding = max(MIN_WIDTH, pl.next_power_of_2(width)) - width
    q, k, v = (
        jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, padding)]) if padding else x for x in pad_to_blocks(block, q, k, v)
    )
    out: Any = _attend(q, k, v, segments.padded(block), width**-0.5)
    return out[:, :length, :, :width]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, segments, scale):
    return _forward(q, k, v, segments, scale)[0]


def _forward(q, k, v, segments, scale):
    (batch, length, heads, width), groups = q.shape, q.shape[2] // k.shape[2]
    blocks = FORWARD[q.dtype.itemsize]
    own, row, first, whole = _query_specs(blocks.own, length, width, groups)
    results = _call(
        functools.partial(_forward_kernel, step=blocks.step, scale=scale),
        blocks,
        (length // blocks.own, heads, batch),
        [own, whole, whole, first],
        [own, row],
        [q, jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)],
    )(q, k, v, segments.first)
    # Naming these arrays lets remat policies keep them. The backward pass needs no other results of this kernel.
    out, log_normalizer = checkpoint_name(tuple(results), "attention")
    return out, (q, k, v, segments, out, log_normalizer)


def _backward(scale, residuals, d_out):
    q, k, v, segments, out, log_normalizer = residuals
    (batch, length, heads, width), kv_heads = q.shape, k.shape[2]
    groups, blocks = heads // kv_heads, BACKWARD[q.dtype.itemsize]
    out_dot = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1).swapaxes(1, 2)

    own, row, first, whole = _query_specs(blocks.own, length, width, groups)
    (d_q,) = _call(
        functools.partial(_query_kernel, step=blocks.step, scale=scale),
        blocks,
        (length // blocks.own, heads, batch),
        [own, whole, whole, first, own, row, row],
        [own],
        [q],
    )(q, k, v, segments.first, d_out, log_normalizer, out_dot)

    own = pl.BlockSpec((None, blocks.own, None, width), lambda j, h, b: (b, j, h, 0))
    whole = pl.BlockSpec((None, length, groups, width), lambda j, h, b: (b, 0, h, 0))
    rows = pl.BlockSpec((None, groups, length), lambda j, h, b: (b, h, 0))
    first = pl.BlockSpec((None, length), lambda j, h, b: (b, 0))
    last = pl.BlockSpec((None, 1), lambda j, h, b: (b, j))
    d_k, d_v = _call(
        functools.partial(_key_kernel, step=blocks.step, scale=scale),
        blocks,
        (length // blocks.own, kv_heads, batch),
        [whole, own, own, first, last, whole, rows, rows],
        [own, own],
        [k, v],
    )(q, k, v, segments.first, segments.last_query_blocks(blocks.step, blocks.own), d_out, log_normalizer, out_dot)
    return d_q, d_k, d_v, None


_attend.defvjp(_forward, _backward)


def _query_specs(block, length, width, groups):
    """Returns the specs of a query block, of per-query arrays [B, H, T] and [B, T], and of all keys of a head."""
    own = pl.BlockSpec((None, block, None, width), lambda i, h, b: (b, i, h, 0))
    row = pl.BlockSpec((None, None, block), lambda i, h, b: (b, h, i))
    first = pl.BlockSpec((None, block), lambda i, h, b: (b, i))
    return own, row, first, pl.BlockSpec((None, length, None, width), lambda i, h, b: (b, 0, h // groups, 0))


def _call(kernel, blocks, grid, in_specs, out_specs, results):
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        compiler_params=pallas_triton.CompilerParams(num_warps=blocks.warps, num_stages=2),
        interpret=platform() == "cpu",
        name=f"packed_attention{kernel.func.__name__}",
    )


def _dot(a, b, contract):
    """Contracts a and b over these axes, with float32 accumulation."""
    return jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)


ROWS_BY_ROWS, ROWS_BY_COLUMNS = ((1,), (1,)), ((1,), (0,))


def _positions(block, size):
    """Returns the indices of the tokens of a block."""
    return block * size + jnp.arange(size, dtype=jnp.int32)


def _visible(keys, first, queries):
    return (keys >= first) & (keys <= queries)


def _forward_kernel(q_ref, k_ref, v_ref, first_ref, out_ref, log_normalizer_ref, *, step, scale):
    block, i = q_ref.shape[0], pl.program_id(0)
    q, first, queries = q_ref[...], first_ref[...], _positions(i, block)

    def visit(j, carry):
        largest, total, out = carry
        at = pl.ds(j * step, step)
        scores = _dot(q, k_ref[at, :], ROWS_BY_ROWS) * (scale * math.log2(math.e))
        scores = jnp.where(_visible(_positions(j, step)[None], first[:, None], queries[:, None]), scores, MASK_VALUE)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
        p, shrink = jnp.exp2(scores - new_largest[:, None]), jnp.exp2(largest - new_largest)
        out = out * shrink[:, None] + _dot(p.astype(v_ref.dtype), v_ref[at, :], ROWS_BY_COLUMNS)
        return new_largest, total * shrink + jnp.sum(p, axis=1), out

    carry = jnp.full(block, MASK_VALUE, jnp.float32), jnp.zeros(block, jnp.float32), jnp.zeros(q_ref.shape, jnp.float32)
    begin, end = jax.lax.div(first_ref[0], step), (i + 1) * (block // step)
    largest, total, out = jax.lax.fori_loop(begin, end, visit, carry)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    log_normalizer_ref[...] = largest + jnp.log2(total)


def _query_kernel(q_ref, k_ref, v_ref, first_ref, d_out_ref, log_normalizer_ref, out_dot_ref, d_q_ref, *, step, scale):
    block, i = q_ref.shape[0], pl.program_id(0)
    q, d_out, first, queries = q_ref[...], d_out_ref[...], first_ref[...], _positions(i, block)
    log_normalizer, out_dot = log_normalizer_ref[...], out_dot_ref[...]

    def visit(j, d_q):
        k, v = k_ref[pl.ds(j * step, step), :], v_ref[pl.ds(j * step, step), :]
        scores = _dot(q, k, ROWS_BY_ROWS) * (scale * math.log2(math.e))
        seen = _visible(_positions(j, step)[None], first[:, None], queries[:, None])
        p = jnp.where(seen, jnp.exp2(scores - log_normalizer[:, None]), 0.0)
        d_scores = p * (_dot(d_out, v, ROWS_BY_ROWS) - out_dot[:, None])
        return d_q + _dot(d_scores.astype(k.dtype), k, ROWS_BY_COLUMNS)

    begin, end = jax.lax.div(first_ref[0], step), (i + 1) * (block // step)
    d_q = jax.lax.fori_loop(begin, end, visit, jnp.zeros(q_ref.shape, jnp.float32))
    d_q_ref[...] = (d_q * scale).astype(d_q_ref.dtype)


def _key_kernel(
    q_ref,
    k_ref,
    v_ref,
    first_ref,
    last_ref,
    d_out_ref,
    log_normalizer_ref,
    out_dot_ref,
    d_k_ref,
    d_v_ref,
    *,
    step,
    scale,
):
    """Computes d_k and d_v with transposed scores [keys, queries], summed over the query heads that share the keys."""
    block, j = k_ref.shape[0], pl.program_id(0)
    k, v, keys = k_ref[...], v_ref[...], _positions(j, block)

    def visit(i, carry, head):
        d_k, d_v = carry
        at = pl.ds(i * step, step)
        q, d_out, first = q_ref[at, head, :], d_out_ref[at, head, :], first_ref[at]
        scores = _dot(k, q, ROWS_BY_ROWS) * (scale * math.log2(math.e))
        seen = _visible(keys[:, None], first[None], _positions(i, step)[None])
        p = jnp.where(seen, jnp.exp2(scores - log_normalizer_ref[head, at][None]), 0.0)
        d_v += _dot(p.astype(q.dtype), d_out, ROWS_BY_COLUMNS)
        d_scores = p * (_dot(v, d_out, ROWS_BY_ROWS) - out_dot_ref[head, at][None])
        return d_k + _dot(d_scores.astype(q.dtype), q, ROWS_BY_COLUMNS), d_v

    def each_head(head, carry):
        return jax.lax.fori_loop(j * (block // step), last_ref[0] + 1, functools.partial(visit, head=head), carry)

    zeros = jnp.zeros(k_ref.shape, jnp.float32)
    d_k, d_v = jax.lax.fori_loop(0, q_ref.shape[1], each_head, (zeros, zeros))
    d_k_ref[...] = (d_k * scale).astype(d_k_ref.dtype)
    d_v_ref[...] = d_v.astype(d_v_ref.dtype)
