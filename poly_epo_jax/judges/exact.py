"""Judge for tasks that determine the strategy of each response."""

import itertools
from collections.abc import Hashable, Sequence

import numpy as np

from poly_epo_jax.types import DEGENERATE_CLUSTER, Clustering, Group, Strategic


class ExactJudge:
    """Clusters generations by `task.strategy`.

    Args:
      task: Determines the strategies.
    """

    def __init__(self, task: Strategic):
        self._task = task

    async def cluster(self, group: Group) -> Clustering:
        """Returns one cluster per strategy. Generations without a strategy are in `DEGENERATE_CLUSTER`."""
        return clusters_of([self._task.strategy(group.problem, generation) for generation in group.generations])


def clusters_of(keys: Sequence[Hashable | None]) -> Clustering:
    """Returns one cluster per distinct key, numbered by first appearance, and `DEGENERATE_CLUSTER` for None."""
    unused = (i for i in itertools.count() if i != DEGENERATE_CLUSTER)
    ids: dict[Hashable, int] = {None: DEGENERATE_CLUSTER}
    for key in keys:
        if key not in ids:
            ids[key] = next(unused)
    return Clustering(np.array([ids[key] for key in keys], np.int32))
