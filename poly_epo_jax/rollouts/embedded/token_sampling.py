"""Draws the next token of every row from its cumulative probabilities, with top-k and top-p filters but no sort.

The vocabulary is split into blocks: one uniform number picks a block by the blocks' probabilities, another picks a
token within it. The filters keep whatever is at least as likely as some threshold, so a draw may ignore top-p at first.
If the tokens likelier than the drawn one already reach `top_p`, top-p keeps neither that token nor any as unlikely, and
the next draw is among the likelier ones. The token that is finally accepted has the filtered distribution.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, UInt32

BLOCK = 128  # tokens of the vocabulary in a block


@partial(jax.jit, static_argnames=("temperature", "top_p", "top_k"))
def sample_tokens(
    logits: Float[Array, "V B"],
    seeds: UInt32[Array, " B"],
    indices: Int[Array, " B"],
    *,
    temperature: float,
    top_p: float,
    top_k: int,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """One token per row, and its log-softmax(logits / temperature), which is not renormalised for the filters.

    The randomness depends only on the generation's seed and the token's index in the response. The filters keep the
    `top_k` likeliest tokens (0: all), and of those the fewest likeliest whose probabilities reach `top_p` of their sum;
    ties with the last token kept are kept too.
    """
    padding = -logits.shape[0] % BLOCK
    logits = jnp.pad(logits / (temperature or 1.0), ((0, padding), (0, 0)), constant_values=-jnp.inf)
    logits = logits.reshape(-1, BLOCK, logits.shape[1])
    likeliest = logits.max(axis=1)
    shifted = logits - likeliest.max(axis=0)[None, None]
    mass = jnp.exp(shifted).sum(axis=1)
    log_total = jnp.log(mass.sum(axis=0))
    if temperature == 0:
        block = jnp.argmax(likeliest, axis=0)
        place = jnp.argmax(_block(logits, block), axis=0)
    else:
        p = jnp.exp(shifted)
        if top_k:
            p = keep_top_k(p, top_k)
            mass = p.sum(axis=1)
        block, place = _draw(p, mass, seeds, indices, top_p)
    logprob = _pick(_block(shifted, block), place) - log_total
    return (block * BLOCK + place).astype(jnp.int32), logprob


def _draw(
    p: Float[Array, "C K B"], mass: Float[Array, "C B"], seeds: jax.Array, indices: jax.Array, top_p: float
) -> tuple[jax.Array, jax.Array]:
    """Draws (block, place in it) of a token per row, by `p`, among what top-p keeps; `mass` is each block's sum."""
    enough = top_p * mass.sum(axis=0)

    def draw(attempt: jax.Array | int, floor: jax.Array, mass: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        u, w = two_uniforms(seeds, indices, attempt)
        block = invert(mass, u)
        within = _block(p, block)
        place = invert(jnp.where(within > floor[None], within, 0.0), w)
        return block, place, _pick(within, place)

    nothing = jnp.zeros(enough.shape, p.dtype)
    if top_p >= 1:
        return draw(0, nothing, mass)[:2]

    def again(state):
        attempt, accepted, block, place, floor, mass = state
        drawn_block, drawn_place, drawn = draw(attempt, floor, mass)
        block, place = jnp.where(accepted, block, drawn_block), jnp.where(accepted, place, drawn_place)
        likelier = mass_above(p, drawn)
        return attempt + 1, accepted | (likelier.sum(axis=0) < enough), block, place, drawn, likelier

    zeros = jnp.zeros(enough.shape, jnp.int32)
    start = (0, jnp.zeros(enough.shape, bool), zeros, zeros, nothing, mass)
    _, _, block, place, _, _ = jax.lax.while_loop(lambda state: ~state[1].all(), again, start)
    return block, place


def mass_above(p: Float[Array, "C K B"], floor: Float[Array, " B"]) -> Float[Array, "C B"]:
    """Per block, the sum of the values that are greater than their row's floor."""
    return jnp.where(p > floor[None, None], p, 0.0).sum(axis=1)


def two_uniforms(seeds: jax.Array, indices: jax.Array, attempt: jax.Array | int) -> list[jax.Array]:
    """Two numbers in [0, 1) per row: Threefry of the counter (index, 0) under the key (seed, attempt)."""
    key = seeds, jnp.full_like(seeds, attempt)
    words = threefry2x32_p.bind(*key, indices.astype(jnp.uint32), jnp.zeros_like(seeds))
    return [(word >> 8).astype(jnp.float32) * 2.0**-24 for word in words]


def invert(weights: Float[Array, "K B"], u: Float[Array, " B"]) -> Int[Array, " B"]:
    """Inverts each row's cumulative weights at u in [0, 1); the index it returns never has zero weight."""
    cumulative = jnp.where(weights > 0, jnp.cumsum(weights, axis=0), 0.0)
    # Rounding may put cumulative sums slightly out of order; for a value below their maximum, one is always found.
    return jnp.argmax(cumulative > (u * cumulative.max(axis=0))[None], axis=0).astype(jnp.int32)


def keep_top_k(p: Float[Array, "C K B"], k: int) -> Float[Array, "C K B"]:
    """Sets every value below the k-th largest of its row to zero; all values are in [0, 1].

    The k-th largest is found by bisecting an interval of integers: floats in [0, 1] are ordered like their bits.
    """
    bits = jax.lax.bitcast_convert_type(p, jnp.int32)

    def unsettled(state):
        low, high, count = state
        return (high - low > 1) & (count != k)

    def halve(state):
        low, high, count = state
        middle = (low + high) // 2
        reached = (bits >= middle[None, None]).sum(axis=(0, 1), dtype=jnp.int32)
        up = unsettled(state) & (reached >= k)
        down = unsettled(state) & (reached < k)
        return jnp.where(up, middle, low), jnp.where(down, middle, high), jnp.where(up, reached, count)

    low = jnp.zeros(p.shape[2:], jnp.int32)
    high = jnp.full_like(low, jax.lax.bitcast_convert_type(jnp.float32(1), jnp.int32) + 1)
    low, _, _ = jax.lax.while_loop(lambda state: unsettled(state).any(), halve, (low, high, jnp.full_like(low, -1)))
    return jnp.where(bits >= low[None, None], p, 0.0)


def _block(x: Float[Array, "C K B"], block: Int[Array, " B"]) -> Float[Array, "K B"]:
    return jnp.take_along_axis(x, block[None, None], axis=0)[0]


def _pick(x: Float[Array, "K B"], place: Int[Array, " B"]) -> Float[Array, " B"]:
    return jnp.take_along_axis(x, place[None], axis=0)[0]
