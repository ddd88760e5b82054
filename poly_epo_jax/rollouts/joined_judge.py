"""A judge that joins the partitions of two judges, for `judge.verify`."""

import asyncio
import dataclasses
from collections import Counter

from poly_epo_jax.judges.exact import clusters_of
from poly_epo_jax.judges.ngrams import component_roots
from poly_epo_jax.rollouts.returned_values import checked_clustering
from poly_epo_jax.types import (
    DEGENERATE_CLUSTER,
    Clustering,
    Group,
    HasMetrics,
    Identified,
    Judge,
    JudgeFailure,
    ServerBacked,
)


class JoinedJudge:
    """Assigns two responses to one cluster if either of two judges does, directly or through other responses.

    A response is degenerate if either judge finds it degenerate. If a judge fails, so does this one. Rationales and
    features are those of the first judge.

    Args:
      first: The training judge.
      second: The second judge. Both requests are made at the same time.
    """

    def __init__(self, first: Judge, second: Judge):
        self.parts = (first, second)

    async def cluster(self, group: Group) -> Clustering | JudgeFailure | None:
        """Requests both partitions and joins them.

        Raises:
          ValueError: If a judge returns an invalid value.
        """
        returned = await asyncio.gather(*(judge.cluster(group) for judge in self.parts))
        found = [checked_clustering(judge, group, one) for judge, one in zip(self.parts, returned, strict=True)]
        clusterings = [one for one in found if isinstance(one, Clustering)]
        if len(clusterings) < len(found):
            return next(one for one in found if not isinstance(one, Clustering))
        ids = [one.ids for one in clusterings]
        degenerate = (ids[0] == DEGENERATE_CLUSTER) | (ids[1] == DEGENERATE_CLUSTER)
        same = (ids[0][:, None] == ids[0]) | (ids[1][:, None] == ids[1])
        roots = component_roots(same & ~degenerate[:, None] & ~degenerate)
        keys = [None if is_degenerate else root for root, is_degenerate in zip(roots, degenerate, strict=True)]
        return dataclasses.replace(clusterings[0], ids=clusters_of(keys).ids)

    async def wait_until_ready(self) -> None:
        """Waits until the servers of both judges respond."""
        await asyncio.gather(*(judge.wait_until_ready() for judge in self.parts if isinstance(judge, ServerBacked)))

    async def identity(self) -> dict[str, str]:
        """Returns the identities of both judges. Keys of the second judge begin with `audit`."""
        first, second = [await judge.identity() if isinstance(judge, Identified) else {} for judge in self.parts]
        return first | {f"audit.{key}": value for key, value in second.items()}

    def metrics(self) -> dict[str, float]:
        """Returns the sums of the counters of both judges."""
        total: Counter[str] = Counter()
        for judge in self.parts:
            total.update(judge.metrics() if isinstance(judge, HasMetrics) else {})
        return dict(total)
