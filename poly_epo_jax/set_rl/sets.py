"""Constructs the sets of n generations that are scored: all sets, or K random ones (paper §3)."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Int32, Key, Shaped, UInt32

from poly_epo_jax.set_rl.groups import as_array

Sets = Shaped[Array | np.ndarray, "K n"] | Shaped[Array | np.ndarray, "P K n"] | Sequence[Any]
"""Generation indices of sets, before `as_sets` converts and checks them."""

_SMALL_TABLE = 2**16  # number of sets
_MAX_TABLE_BYTES = 2**30


def check_set_size(num_generations: int, set_size: int) -> None:
    """Raises ValueError if not 1 <= set_size < num_generations."""
    if set_size < 1:
        raise ValueError(f"set_size={set_size} must be at least 1.")
    if num_generations <= set_size:
        raise ValueError(
            f"num_generations={num_generations} must exceed set_size={set_size}; "
            "generate more responses per prompt or use smaller sets."
        )


def as_sets(sets: Sets, num_prompts: int, num_generations: int) -> Int32[Array, "K n"] | Int32[Array, "P K n"]:
    """Converts sets to an array and checks them. Indices are checked outside jit only, where they are known.

    Args:
      sets: Generation indices, either one table for all prompts or one table per prompt.
      num_prompts: Number P of prompts.
      num_generations: Number N of generations per prompt.

    Returns:
      The indices, int32, of shape [K, n] or [P, K, n].

    Raises:
      ValueError: If `sets` has another shape, is empty or was made for another number of generations, or if n >= N.
    """
    table = as_array("sets", sets)
    if table.ndim not in (2, 3) or not len(table) or (table.ndim == 3 and len(table) != num_prompts):
        raise ValueError(f"sets have shape {table.shape}, but must be [K, n] or [{num_prompts}, K, n], one per prompt.")
    set_size = table.shape[-1]
    check_set_size(num_generations, set_size)
    if isinstance(sets, Tracer):
        return table
    first, last = int(np.min(sets)), int(np.max(sets))
    if first < 0 or last >= num_generations or _is_smaller_table(sets, set_size, last + 1, num_generations):
        raise ValueError(
            f"sets hold the generations {first} to {last}, but the features have num_generations={num_generations}; "
            f"construct them for this number, for example with enumerate_sets({num_generations}, {set_size})."
        )
    return table


def _is_smaller_table(sets: Any, set_size: int, seen: int, num_generations: int) -> bool:
    """Returns True if `sets` are all sets of the first `seen` of the generations, as `enumerate_sets` orders them.

    Sampled sets may also lack the last generations. It is improbable that more than five sampled sets equal such a
    table. A table of at most five sets is therefore only detected if it is the array that `enumerate_sets` returned.
    """
    given = np.asarray(sets)
    num_sets = given.shape[-2]
    if not set_size < seen < num_generations or num_sets != math.comb(seen, set_size):
        return False
    smaller = enumerate_sets(seen, set_size)
    return sets is smaller or (num_sets > 5 and bool((given == smaller).all(axis=(-2, -1)).any()))


@functools.cache
def enumerate_sets(num_generations: int, set_size: int) -> Int32[np.ndarray, "K n"]:
    """Returns all K = C(N, n) sets of n of the N generations, in lexicographic order (paper §3).

    Args:
      num_generations: Number N of generations per prompt.
      set_size: Number n of generations in a set.

    Returns:
      Generation indices, ascending in each row. The array is shared between calls and read-only.

    Raises:
      ValueError: If not 1 <= set_size < num_generations, or if the array would exceed 1 GiB.
    """
    check_set_size(num_generations, set_size)
    total = math.comb(num_generations, set_size)
    if 4 * total * set_size > _MAX_TABLE_BYTES:
        raise ValueError(
            f"num_generations={num_generations} and set_size={set_size} give {total:,} sets, which would take "
            f"{4 * total * set_size / 1e9:,.1f} GB; draw some of them with sample_sets, or use a closed form over all "
            "sets, such as polychromic_advantages."
        )
    members = itertools.chain.from_iterable(itertools.combinations(range(num_generations), set_size))
    sets = np.fromiter(members, np.int32, total * set_size).reshape(total, set_size)
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

    # Otherwise C(N, n) may exceed the range of an integer, so sets are drawn i.i.d. and the first K distinct sets are
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
    order = jnp.lexsort(sets.T)  # stable, so equal rows keep the order in which they were drawn
    ordered = sets[order]
    is_repeat = jnp.zeros(len(sets), bool).at[order[1:]].set((ordered[1:] == ordered[:-1]).all(axis=1))
    return sets[jnp.argsort(is_repeat, stable=True)], jnp.sum(~is_repeat, dtype=jnp.int32)
