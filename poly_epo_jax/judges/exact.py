"""Judge for tasks that determine the strategy of each response."""

import itertools
from collections.abc import Hashable, Sequence

import numpy as np

from poly_epo_jax.types import DEGENERATE_CLUSTER, Clustering, Group, Strategic

COUNTING_CLUSTERS = (DEGENERATE_CLUSTER - 1, DEGENERATE_CLUSTER)
"""Ids that occur in the same clustering only if a judge counts up and does not skip `DEGENERATE_CLUSTER`."""


class ExactJudge:
    """Clusters generations by `task.strategy`.

    Args:
      task: Determines the strategies.
    """

    def __init__(self, task: Strategic):
        self._task = task

    async def cluster(self, group: Group) -> Clustering:
        """Returns one cluster per strategy. Generations without a strategy are in `DEGENERATE_CLUSTER`.

        Raises:
          ValueError: If the task returns a strategy that is not hashable.
        """
        strategies = [self._task.strategy(group.problem, generation) for generation in group.generations]
        try:
            return clusters_of(strategies)
        except TypeError as error:
            raise ValueError(
                f"{type(self._task).__name__}.strategy returned a value for problem {group.problem.id} that cannot be "
                f"compared ({error}); return a string, number or tuple, or None for a degenerate response."
            ) from error


def clusters_of(keys: Sequence[Hashable | None]) -> Clustering:
    """Clusters responses by keys, such as their strategies or the first similar response.

    Args:
      keys: Equal keys for responses of the same cluster, and None for degenerate responses.

    Returns:
      The clusters, numbered from 0 by first appearance. Responses with the key None are in `DEGENERATE_CLUSTER`. Other
      keys never have an id in `COUNTING_CLUSTERS`, because clusterings that contain both of these ids are rejected.

    Raises:
      TypeError: If a key is not hashable.
    """
    unused = (i for i in itertools.count() if i not in COUNTING_CLUSTERS)
    ids: dict[Hashable, int] = {None: DEGENERATE_CLUSTER}
    for key in keys:
        if key not in ids:
            ids[key] = next(unused)
    return Clustering(np.array([ids[key] for key in keys], np.int32))
