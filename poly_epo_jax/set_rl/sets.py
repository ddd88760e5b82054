"""Which sets of n generations are scored: all of them, or K drawn at random (paper §3)."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32, Key, UInt32

_SMALL_TABLE = 2**16


def check_set_size(num_generations: int, set_size: int) -> None:
    """Raises ValueError unless 1 <= set_size < num_generations."""
    if set_size < 1:
        raise ValueError(f"set_size is {set_size}, but a set holds at least one generation.")
    if num_generations <= set_size:
        raise ValueError(
            f"num_generations is {num_generations} and must exceed set_size {set_size}: "
            "draw more generations or form smaller sets."
        )


@functools.cache
def enumerate_sets(num_generations: int, set_size: int) -> Int32[np.ndarray, "K n"]:
    """All K = C(N, n) sets of n of the N generations, in lexicographic order (paper §3).

    Returns:
      Generation indices, ascending in each row. The array is shared between calls and read-only.

    Raises:
      ValueError: unless 1 <= set_size < num_generations.
    """
    check_set_size(num_generations, set_size)
    sets = np.array(list(itertools.combinations(range(num_generations), set_size)), np.int32)
    sets.flags.writeable = False
    return sets


@functools.partial(jax.jit, static_argnames=("num_generations", "set_size", "num_sets"))
def sample_sets(
    key: Key[Array, ""] | UInt32[Array, "2"], num_generations: int, set_size: int, num_sets: int
) -> Int32[Array, "K n"]:
    """K distinct sets, uniform without replacement from all C(N, n) of them (paper §3, sampled variant).

    Returns:
      Generation indices, ascending in each row.

    Raises:
      ValueError: unless 1 <= set_size < num_generations and 1 <= num_sets <= C(N, n).
    """
    check_set_size(num_generations, set_size)
    total = math.comb(num_generations, set_size)
    if not 1 <= num_sets <= total:
        raise ValueError(
            f"num_sets is {num_sets}, but between 1 and C({num_generations}, {set_size}) = {total} sets can be drawn."
        )
    # A table of all sets is the fast way if it is small, or at most twice as long as the result.
    if total <= max(_SMALL_TABLE, 2 * num_sets):
        rows = jax.random.choice(key, total, (num_sets,), replace=False)
        return jnp.asarray(enumerate_sets(num_generations, set_size))[rows]

    # Elsewhere C(N, n) may not even fit an integer, so draw sets i.i.d. and keep the first K distinct ones. Given the
    # distinct sets so far, the next new one is uniform over the sets not yet seen: a draw without replacement, exactly.
    def draw(key: Array) -> Array:
        generations = jnp.broadcast_to(jnp.arange(num_generations, dtype=jnp.int32), (num_sets, num_generations))
        return jnp.sort(jax.random.permutation(key, generations, axis=1, independent=True)[:, :set_size], axis=1)

    def redraw(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        key, sets, _ = state
        key, draw_key = jax.random.split(key)
        sets, num_distinct = _distinct_first(jnp.concatenate([sets, draw(draw_key)]))
        return key, sets[:num_sets], num_distinct

    key, draw_key = jax.random.split(key)
    _, sets, _ = jax.lax.while_loop(lambda state: state[2] < num_sets, redraw, (key, *_distinct_first(draw(draw_key))))
    return sets


def _distinct_first(sets: Int32[Array, "M n"]) -> tuple[Int32[Array, "M n"], Int32[Array, ""]]:
    """Moves repeats of an earlier row behind the distinct rows, keeps the order otherwise; counts the distinct rows."""
    order = jnp.lexsort(sets.T)  # stable: the first of equal rows is the one drawn first
    ordered = sets[order]
    is_repeat = jnp.zeros(len(sets), bool).at[order[1:]].set((ordered[1:] == ordered[:-1]).all(axis=1))
    return sets[jnp.argsort(is_repeat, stable=True)], jnp.sum(~is_repeat, dtype=jnp.int32)
