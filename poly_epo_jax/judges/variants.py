"""Variants of a judge's request: the same responses with another seed of the judge, or in another order."""

import hashlib
import json
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Variant(NamedTuple):
    """A variant of a request.

    Attributes:
      seed: Number of the seed.
      order: Number of the order of the responses. 0 is the recorded order.
    """

    seed: int
    order: int


FIRST = Variant(0, 0)


def variants(num_seeds: int, num_orders: int) -> list[Variant]:
    """Returns all variants, beginning with `FIRST`.

    Args:
      num_seeds: Number of seeds, including seed 0.
      num_orders: Number of orders, including the recorded order.
    """
    return [FIRST, *(Variant(seed, 0) for seed in range(1, num_seeds)), *(Variant(0, o) for o in range(1, num_orders))]


def permutation(name: str, order: int, num_responses: int) -> Int[np.ndarray, " N"]:
    """Returns the indices of the responses in a given order. Order 0 is the identity, and others are never.

    Args:
      name: Name of the group, from which the permutation is derived.
      order: Number of the order.
      num_responses: Number N of responses, at least 2.
    """
    identity = np.arange(num_responses)
    if order == 0:
        return identity
    seed = hashlib.sha256(json.dumps([name, order]).encode()).digest()
    permuted = np.random.default_rng(int.from_bytes(seed[:8])).permutation(num_responses)
    return permuted if (permuted != identity).any() else identity[::-1]
