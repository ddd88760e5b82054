"""Arrays [P, N] of groups with M of N generations, because the environment or the reward failed on the others.

Each row begins with the values of the M generations, in order, and ends with N - M entries without meaning.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from poly_epo_jax.config.keys import Config
from poly_epo_jax.step.advantages import AdvantageFunction, batch_features, make_estimator
from poly_epo_jax.types import GradedGroup


def min_group(config: Config) -> int:
    """Returns the minimum M of a group that is trained on."""
    return max(2, make_estimator(config.algo).min_generations, config.rollouts.min_group)


def group_advantages(
    advantages: AdvantageFunction, step: int, groups: Sequence[GradedGroup], num_generations: int
) -> Float[np.ndarray, "P N"]:
    """Applies an estimator to the M generations of each group. Groups with equal M are passed in one call.

    Args:
      advantages: The estimator, see `make_advantages`.
      step: The step.
      groups: Graded groups.
      num_generations: Number N of generations per prompt.

    Returns:
      The advantages. Entries without meaning are NaN.
    """
    found = np.full((len(groups), num_generations), np.nan, np.float32)
    sizes = np.array([len(group.rewards) for group in groups])
    for size in np.unique(sizes).tolist():
        places = np.flatnonzero(sizes == size).tolist()
        own = [groups[place] for place in places]
        found[places, :size] = advantages(step, [one.group.problem for one in own], batch_features(own))
    return found


def padded(rows: Sequence[Sequence[Any]], num_generations: int) -> Float[np.ndarray, "P N"]:
    """Returns an array with the given rows of M values. Entries without meaning are 0."""
    table = np.zeros((len(rows), num_generations))
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    return table
