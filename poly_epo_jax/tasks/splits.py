"""Which problems are trained on and which are held out."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def split(items: Sequence[T], *, seed: int, num_train: int, num_held_out: int) -> tuple[list[T], list[T]]:
    """Shuffles the items that problems are made from, by `seed`, and returns disjoint (train, held out) ones.

    Raises:
      ValueError: more problems are requested than there are.
    """
    if min(num_train, num_held_out) < 0 or num_train + num_held_out > len(items):
        raise ValueError(
            f"num_train={num_train} and num_held_out={num_held_out} must not be negative and must add up to at most "
            f"{len(items)}, the number of problems of this difficulty."
        )
    chosen = [items[i] for i in np.random.default_rng(seed).permutation(len(items))[: num_train + num_held_out]]
    return chosen[:num_train], chosen[num_train:]
