"""Constructs the sets of n generations that are scored: all sets, or K random ones (paper §3)."""

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
    """Raises ValueError if not 1 <= set_size < num_generations."""
    if set_size < 1:
        raise ValueError(f"set_size={set_size} must be at least 1.")
    if num_generations <= set_size:
        raise ValueError(
            f"num_generations={num_generations} must exceed set_size={set_size}; "
            "generate more responses per prompt or use smaller sets."
        )


@functools.cache
def enumerate_sets(num_generations: int, set_size: int) -> Int32[np.ndarray, "K n"]:
    """Returns all K = C(N, n) sets of n of the N generations, in lexicographic order (paper §3).

    Args:
      num_generations: Number N of generations per prompt.
      set_size: Number n of generations in a set.

    Returns:
      Generation indices, ascending in each row. The array is shared between calls and read-only.

    Raises:
      ValueError: If not 1 <= set_size < num_generations.
    """
    check_set_size(num_generations, set_size)
    sets = np.array(list(itertools.combinations(range(num_generations), set_size)), np.int32)
    sets.flags.writeable = False
    return sets


@functools.partial(jax.jit, static_argnames=("num_generations", "set_size", "num_sets"))
def sample_sets(
    key: Key[Array, ""] | UInt32[Array, "2"], num_generations: int, set_size: int, num_sets: int
) -> Int32[Array, "K n"]:
    """Draws K distinct sets uniformly without replacement from all C(N, n) sets (paper §3, sampled variant).

    Args:
      key: Random key. Equal keys give equal sets.
      num_generations: Number N of generations per prompt.
      set_size: Number n of generations in a set.
      num_sets: Number K of sets.

    Returns:
      Generation indices, ascending in each row.

    Raises:
      ValueError: If not 1 <= set_size < num_generations, or not 1 <= num_sets <= C(N, n).
    """
    check_set_size(num_generations, set_size)
    total = math.comb(num_generations, set_size)
    if not 1 <= num_sets <= total:
        raise ValueError(f"num_sets={num_sets} must lie between 1 and C({num_generations}, {set_size}) = {total}.")
    # Selecting rows from a table of all sets is faster if the table is small, or at most twice as long as the result.
    if total <= max(_SMALL_TABLE, 2 * num_sets):
        rows = jax.random.choice(key, total, (num_sets,), replace=False)
        return jnp.asarray(enumerate_sets(num_generations, set_size))[rows]

    # Otherwise C(N, n) may exceed the range of an integer, so sets are drawn i.i.d. and the first K distinct ones are
    # kept. Given the distinct sets so far, the next new set is uniform over the remaining sets, so this is exactly a
    # draw without replacement.
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
    """Moves repeated rows behind the distinct rows, which keep their order, and counts the distinct rows."""
    order = jnp.lexsort(sets.T)  # stable: of equal rows, the one drawn first comes first
    ordered = sets[order]
    is_repeat = jnp.zeros(len(sets), bool).at[order[1:]].set((ordered[1:] == ordered[:-1]).all(axis=1))
    return sets[jnp.argsort(is_repeat, stable=True)], jnp.sum(~is_repeat, dtype=jnp.int32)
