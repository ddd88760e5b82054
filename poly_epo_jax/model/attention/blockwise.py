"""Attention in plain JAX that computes the [T, T] scores in blocks (FlashAttention-2, Dao 2023).

A block of queries visits the blocks of keys from the start of its earliest segment to itself, and the blocks of shared
prompts. The time therefore depends on the lengths of the packed sequences, not on the length of the row. On CPUs, this
implementation takes a third of the time of attention with the full score matrix.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from poly_epo_jax.model.attention.segments import MASK_VALUE, Segments, pad_to_blocks

BLOCK = 128  # Tokens per block. The scores of a block fit in the cache of a CPU core.


def blockwise_attention(
    q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], segments: Segments
) -> Float[Array, "B T H D"]:
    """Implements `packed_attention` on any platform. The backward pass recomputes the scores of each block.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      segments: Visible tokens of each token, including shared prompts.

    Returns:
      The outputs of all query heads.
    """
    length, block = q.shape[1], min(BLOCK, q.shape[1])
    q, k, v = pad_to_blocks(block, q * q.shape[-1] ** -0.5, k, v)
    seen = segments.padded(block)
    out = _attend(_query_blocks(q, k.shape[2], block), _blocks(k, block), _blocks(v, block), seen)
    return _rows(out, q.shape[2])[:, :length]


# Blocks of queries are [blocks, B, K, G * block, D], with the G query heads of each key head concatenated. Blocks of
# keys and values are [blocks, B, K, block, D].


def _query_blocks(x, kv_heads, block):
    batch, length, heads, width = x.shape
    x = x.reshape(batch, length // block, block, kv_heads, heads // kv_heads, width)
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(length // block, batch, kv_heads, -1, width)


def _blocks(x, block):
    batch, length, heads, width = x.shape
    return x.reshape(batch, length // block, block, heads, width).transpose(1, 0, 3, 2, 4)


def _rows(x, heads):
    """Converts blocks of queries to [B, T, H, D]."""
    blocks, batch, kv_heads, _, width = x.shape
    x = x.reshape(blocks, batch, kv_heads, heads // kv_heads, -1, width)
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, width)


class _Step(NamedTuple):
    """A block of queries, and the keys that it sees."""

    seen: Segments  # Segments of the queries in this block, [B, block].
    query_block: jax.Array
    block: int
    groups: int

    def key_blocks(self):
        """Returns the number of visited key blocks, and a function that maps i to the index of the i-th one.

        Key blocks of shared prompts are visited first, followed by the key blocks of the segments of the queries.
        """
        seen, own = self.seen, jnp.min(self.seen.first) // self.block
        prompt = jnp.min(seen.prompt) // self.block
        prompt_end = -(-jnp.max(seen.prompt_end) // self.block)
        shared = jnp.maximum(jnp.minimum(prompt_end, own) - prompt, 0)
        return shared + self.query_block + 1 - own, lambda i: jnp.where(i < shared, prompt + i, own + i - shared)

    def visible(self, key_block):
        """Returns the mask [B, 1, G * block, block] of visible keys in a key block."""
        index = jnp.arange(self.block)
        keys, queries = (key_block * self.block + index)[None, None], self.query_block * self.block + index
        first, prompt, prompt_end = (x[:, :, None] for x in (self.seen.first, self.seen.prompt, self.seen.prompt_end))
        own = (keys >= first) & (keys <= queries[None, :, None])
        seen = own | ((keys >= prompt) & (keys < prompt_end))
        return jnp.tile(seen, (1, self.groups, 1))[:, None]


def _make_step(q, k, seen, query_block):
    block, groups = k.shape[-2], q.shape[-2] // k.shape[-2]
    own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, query_block * block, block, axis=1), seen)
    return _Step(own, query_block, block, groups)


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _attend(q, k, v, seen):
    return _forward(q, k, v, seen)[0]


def _forward(q, k, v, seen):
    def one_query_block(inputs):
        query_block, q = inputs
        step = _make_step(q, k, seen, query_block)
        count, key_block = step.key_blocks()

        def one_key_block(i, carry):
            j, (largest, total, out) = key_block(i), carry
            scores = jnp.where(step.visible(j), _einsum("bkqd,bksd->bkqs", q, k[j]), MASK_VALUE)
            new_largest = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
            p, shrink = jnp.exp(scores - new_largest), jnp.exp(largest - new_largest)
            out = out * shrink + _einsum("bkqs,bksd->bkqd", p.astype(v.dtype), v[j])
            return new_largest, total * shrink + p.sum(axis=-1, keepdims=True), out

        zero = jnp.zeros((*q.shape[:-1], 1), jnp.float32)
        carry = jnp.full_like(zero, MASK_VALUE), zero, jnp.zeros(q.shape, jnp.float32)
        largest, total, out = jax.lax.fori_loop(0, count, one_key_block, carry)
        return (out / total).astype(q.dtype), largest + jnp.log(total)

    outputs = jax.lax.map(one_query_block, (jnp.arange(q.shape[0]), q))
    # Naming these arrays lets remat policies keep them. The backward pass needs no other results of this loop.
    out, log_normalizer = checkpoint_name(outputs, "attention")
    return out, (q, k, v, seen, out, log_normalizer)


def _backward(residuals, d_out):
    q, k, v, seen, out, log_normalizer = residuals

    def one_query_block(carry, inputs):
        query_block, q, out, log_normalizer, d_out = inputs
        step = _make_step(q, k, seen, query_block)
        count, key_block = step.key_blocks()
        out_dot = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)

        def one_key_block(i, carry):
            j, (d_k, d_v, d_q) = key_block(i), carry
            scores = _einsum("bkqd,bksd->bkqs", q, k[j])
            p = jnp.where(step.visible(j), jnp.exp(scores - log_normalizer), 0.0)
            d_scores = p * (_einsum("bkqd,bksd->bkqs", d_out, v[j]) - out_dot)
            p, d_scores = p.astype(q.dtype), d_scores.astype(q.dtype)
            d_k = d_k.at[j].add(_einsum("bkqs,bkqd->bksd", d_scores, q))
            d_v = d_v.at[j].add(_einsum("bkqs,bkqd->bksd", p, d_out))
            return d_k, d_v, d_q + _einsum("bkqs,bksd->bkqd", d_scores, k[j])

        carry = (*carry, jnp.zeros(q.shape, jnp.float32))
        d_k, d_v, d_q = jax.lax.fori_loop(0, count, one_key_block, carry)
        return (d_k, d_v), d_q.astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32)
    inputs = jnp.arange(q.shape[0]), q, out, log_normalizer, d_out
    (d_k, d_v), d_q = jax.lax.scan(one_query_block, (zeros, zeros), inputs)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attend.defvjp(_forward, _backward)
