"""Samples the next token of every row from cumulative probabilities, with top-k and top-p filters but without sorting.

The vocabulary is split into blocks. One uniform random number selects a block by the blocks' total probabilities, and a
second one selects a token within the block. Both filters keep the tokens whose probability reaches a threshold, so
top-p is implemented by rejection: a token is first drawn without top-p. If the tokens that are more likely than the
drawn token already reach `top_p`, top-p would remove the drawn token and all tokens that are at most as likely. The
next draw is then restricted to the more likely tokens. The accepted token has the filtered distribution.

The generations of a group can use the points of a lattice on [0, 1) with a random shift (`group_lattice`) instead of
independent numbers, as in arithmetic decoding. A token corresponds to the part of the interval that holds its
cumulative probabilities. After each token, this part is rescaled to [0, 1), and with it the point and the spacing of
the lattice. As soon as the spacing is at least 1, no other generation of the group has the same tokens, so independent
numbers are used for the remaining tokens. Float32 suffices until then, because N generations use at most log2(N) of its
24 bits.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, UInt32

BLOCK = 128  # Number of vocabulary tokens per block.
INDEPENDENT = 0.0, 1.0  # Lattice of a single point, with which the numbers of a generation are independent.


@partial(jax.jit, static_argnames=("temperature", "top_p", "top_k"))
def sample_tokens(
    logits: Float[Array, "V B"],
    seeds: UInt32[Array, " B"],
    indices: Int[Array, " B"],
    lattice: Float[Array, "B 2"],
    *,
    temperature: float,
    top_p: float,
    top_k: int,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, "B 2"]]:
    """Samples one token per row.

    The randomness depends only on the seed and the lattice of the generation and on the index of the token in the
    response, so a generation does not depend on the other rows. Top-k is applied before top-p. Tokens that are as
    likely as the least likely token that a filter keeps are kept as well.

    Args:
      logits: Logits [V, B] of B rows over V tokens.
      seeds: Seeds [B] of the generations.
      indices: Indices [B] of the sampled tokens in their responses, counted from 0.
      lattice: Point of each generation and spacing of the points of its group [B, 2]. Ignored if `temperature` is 0 or
        `top_p` is below 1.
      temperature: Divisor of the logits. 0 selects the most likely token.
      top_p: Minimum fraction of the probability mass left by top-k that the kept tokens must reach. The most likely
        tokens are kept. 1 disables the filter.
      top_k: Number of most likely tokens to keep. 0 disables the filter.

    Returns:
      Token ids [B], int32, their log-softmax(logits / temperature) [B], which is not renormalized for the filters, and
      the lattice [B, 2] after these tokens. If `temperature` is 0, the log-softmax is computed with temperature 1.
    """
    padding = -logits.shape[0] % BLOCK
    logits = jnp.pad(logits / (temperature or 1.0), ((0, padding), (0, 0)), constant_values=-jnp.inf)
    logits = logits.reshape(-1, BLOCK, logits.shape[1])
    max_logits = logits.max(axis=1)
    shifted = logits - max_logits.max(axis=0)[None, None]
    mass = jnp.exp(shifted).sum(axis=1)
    log_total = jnp.log(mass.sum(axis=0))
    if temperature == 0:
        block = jnp.argmax(max_logits, axis=0)
        place = jnp.argmax(_block(logits, block), axis=0)
    else:
        p = jnp.exp(shifted)
        if top_k:
            p = keep_top_k(p, top_k)
            mass = p.sum(axis=1)
        block, place, lattice = _draw_tokens(p, mass, seeds, indices, lattice, top_p)
    return (block * BLOCK + place).astype(jnp.int32), _pick(_block(shifted, block), place) - log_total, lattice


def _draw_tokens(
    p: Float[Array, "C K B"],
    mass: Float[Array, "C B"],
    seeds: jax.Array,
    indices: jax.Array,
    lattice: Float[Array, "B 2"],
    top_p: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws one token per row from `p`, whose block sums are `mass`, as (block, index within the block, lattice)."""
    total = mass.sum(axis=0)
    if top_p >= 1:
        u, w = two_uniforms(seeds, indices, 0)
        point, spacing = lattice.T
        is_shared = spacing < 1
        block, point = invert(mass, jnp.where(is_shared, point, u))
        within = _block(p, block)
        place, point = invert(within, jnp.where(is_shared, point, w))
        return block, place, jnp.stack([point, spacing * total / _pick(within, place)], axis=1)
    enough = top_p * total

    def draw(attempt: jax.Array | int, floor: jax.Array, mass: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        u, w = two_uniforms(seeds, indices, attempt)
        block, _ = invert(mass, u)
        within = _block(p, block)
        place, _ = invert(jnp.where(within > floor[None], within, 0.0), w)
        return block, place, _pick(within, place)

    def again(state):
        attempt, accepted, block, place, floor, mass = state
        drawn_block, drawn_place, drawn = draw(attempt, floor, mass)
        block, place = jnp.where(accepted, block, drawn_block), jnp.where(accepted, place, drawn_place)
        mass_above_drawn = mass_above(p, drawn)
        return attempt + 1, accepted | (mass_above_drawn.sum(axis=0) < enough), block, place, drawn, mass_above_drawn

    zeros = jnp.zeros(enough.shape, jnp.int32)
    start = (0, jnp.zeros(enough.shape, bool), zeros, zeros, jnp.zeros(enough.shape, p.dtype), mass)
    _, _, block, place, _, _ = jax.lax.while_loop(lambda state: ~state[1].all(), again, start)
    return block, place, lattice


def group_lattice(seeds: UInt32[np.ndarray, " N"]) -> Float[np.ndarray, "N 2"]:
    """Returns the points of a lattice with a random shift, in random order, and their spacing.

    Each point is uniformly distributed over the multiples of 2^-24 in [0, 1), and any two of them are at least 1 / N
    apart, also modulo 1, up to rounding.

    Args:
      seeds: Seeds [N] of the generations of a group. All seeds are used, so groups of other sizes have other points.

    Returns:
      Points and spacings, float32.
    """
    shift, *words = np.random.SeedSequence(seeds.tolist()).generate_state(len(seeds) + 1).tolist()
    bits = (np.argsort(words) * 2**24 // len(seeds) + shift) % 2**24
    return np.stack([bits * 2.0**-24, np.full(len(seeds), 1 / len(seeds))], axis=1).astype(np.float32)


def mass_above(p: Float[Array, "C K B"], floor: Float[Array, " B"]) -> Float[Array, "C B"]:
    """Returns, for each block, the sum of the values that exceed the threshold of their row.

    Args:
      p: Non-negative values [C, K, B] of C blocks of K tokens in B rows.
      floor: Thresholds [B].

    Returns:
      Sums [C, B].
    """
    return jnp.where(p > floor[None, None], p, 0.0).sum(axis=1)


def two_uniforms(seeds: jax.Array, indices: jax.Array, attempt: jax.Array | int) -> list[jax.Array]:
    """Returns two uniform random numbers in [0, 1) per row: Threefry of counter (index, 0) and key (seed, attempt).

    Args:
      seeds: Seeds [B] of the generations, uint32.
      indices: Indices [B] of the sampled tokens in their responses.
      attempt: Number of rejected draws of this token.

    Returns:
      Two float32 arrays [B] of multiples of 2^-24.
    """
    words = threefry2x32_p.bind(seeds, jnp.full_like(seeds, attempt), indices.astype(jnp.uint32), jnp.zeros_like(seeds))
    return [(word >> 8).astype(jnp.float32) * 2.0**-24 for word in words]


def invert(weights: Float[Array, "K B"], u: Float[Array, " B"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Returns an index per row, drawn by inverting the row's cumulative weights.

    Args:
      weights: Non-negative weights [K, B]. At least one weight of each row must be positive.
      u: Uniform random numbers [B] in [0, 1).

    Returns:
      Indices [B], int32, whose weights are never zero, and the relative positions [B] of `u` between the cumulative
      weights before and at the index, which are in [0, 1).
    """
    cumulative = jnp.where(weights > 0, jnp.cumsum(weights, axis=0), 0.0)
    # Due to rounding, cumulative sums may not be monotonic. A sum above u times their maximum always exists.
    target = u * cumulative.max(axis=0)
    index = jnp.argmax(cumulative > target[None], axis=0).astype(jnp.int32)
    position = 1 - (_pick(cumulative, index) - target) / _pick(weights, index)
    return index, jnp.clip(position, 0.0, 1 - 2.0**-24)


def keep_top_k(p: Float[Array, "C K B"], k: int) -> Float[Array, "C K B"]:
    """Sets all values below the k-th largest value of their row to zero. Ties with the k-th largest value are kept.

    The k-th largest value is found by bisection over integers, because floats in [0, 1] are ordered like their bits.

    Args:
      p: Values [C, K, B] in [0, 1] of C blocks of K tokens in B rows.
      k: Number of values to keep in each row.

    Returns:
      The filtered values [C, K, B].
    """
    bits = jax.lax.bitcast_convert_type(p, jnp.int32)

    def is_unsettled(state):
        low, high, count = state
        return (high - low > 1) & (count != k)

    def halve(state):
        low, high, count = state
        middle = (low + high) // 2
        reached = (bits >= middle[None, None]).sum(axis=(0, 1), dtype=jnp.int32)
        up = is_unsettled(state) & (reached >= k)
        down = is_unsettled(state) & (reached < k)
        return jnp.where(up, middle, low), jnp.where(down, middle, high), jnp.where(up, reached, count)

    low = jnp.zeros(p.shape[2:], jnp.int32)
    high = jnp.full_like(low, jax.lax.bitcast_convert_type(jnp.float32(1), jnp.int32) + 1)
    low, _, _ = jax.lax.while_loop(lambda state: is_unsettled(state).any(), halve, (low, high, jnp.full_like(low, -1)))
    return jnp.where(bits >= low[None, None], p, 0.0)


def _block(x: Float[Array, "C K B"], block: Int[Array, " B"]) -> Float[Array, "K B"]:
    return jnp.take_along_axis(x, block[None, None], axis=0)[0]


def _pick(x: Float[Array, "K B"], place: Int[Array, " B"]) -> Float[Array, " B"]:
    return jnp.take_along_axis(x, place[None], axis=0)[0]
