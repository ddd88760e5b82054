"""No judge, for advantages that do not read clusters."""

import numpy as np

from poly_epo_jax.types import Clustering, Group


class NoJudge:
    """Does not cluster: all generations are in one."""

    async def cluster(self, group: Group) -> Clustering:
        """Zeros [N]."""
        return Clustering(np.zeros(len(group.generations), np.int32))
