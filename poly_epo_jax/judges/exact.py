"""The judge for tasks that know their strategies."""

import itertools
from collections.abc import Hashable, Sequence

import numpy as np

from poly_epo_jax.types import DEGENERATE_CLUSTER, Clustering, Group, Strategic


class ExactJudge:
    """Clusters by `task.strategy`: generations share a cluster exactly when their strategies are equal."""

    def __init__(self, task: Strategic):
        self._task = task

    async def cluster(self, group: Group) -> Clustering:
        """A generation without a strategy is in `DEGENERATE_CLUSTER`."""
        return clusters_of([self._task.strategy(group.problem, generation) for generation in group.generations])


def clusters_of(keys: Sequence[Hashable | None]) -> Clustering:
    """One cluster for each distinct key [N], in order of first appearance; `DEGENERATE_CLUSTER` for None."""
    unused = (i for i in itertools.count() if i != DEGENERATE_CLUSTER)
    ids: dict[Hashable, int] = {None: DEGENERATE_CLUSTER}
    for key in keys:
        if key not in ids:
            ids[key] = next(unused)
    return Clustering(np.array([ids[key] for key in keys], np.int32))
