"""The judge for tasks that know their strategies."""

import itertools
from collections.abc import Hashable

import numpy as np

from poly_epo_jax.types import DEGENERATE_CLUSTER, Clustering, Group, Task


class ExactJudge:
    """Clusters by `task.strategy`: generations share a cluster exactly when their strategies are equal.

    Raises:
      ValueError: the task has no exact clustering.
    """

    def __init__(self, task: Task):
        try:
            for problem in task.train_problems[:1]:
                task.strategy(problem, "")
        except NotImplementedError:
            raise ValueError(
                f"{type(task).__name__} has no exact clustering; use judge 'llm', which reads the responses, instead."
            ) from None
        self._task = task

    async def cluster(self, group: Group) -> Clustering:
        """Ids in order of first appearance, `DEGENERATE_CLUSTER` where there is no strategy."""
        unused = (i for i in itertools.count() if i != DEGENERATE_CLUSTER)
        ids: dict[Hashable, int] = {None: DEGENERATE_CLUSTER}
        strategies = [self._task.strategy(group.problem, generation.text) for generation in group.generations]
        for strategy in strategies:
            if strategy not in ids:
                ids[strategy] = next(unused)
        return Clustering(np.array([ids[strategy] for strategy in strategies], np.int32))
