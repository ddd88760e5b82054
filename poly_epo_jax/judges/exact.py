"""Judge for tasks that determine the strategy of each response."""

import hashlib
import itertools
from collections.abc import Hashable, Sequence
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int

from poly_epo_jax.config.checks import FRACTION
from poly_epo_jax.config.keys import JudgeKeys
from poly_epo_jax.types import (
    DEGENERATE_CLUSTER,
    Clustering,
    Group,
    Interactive,
    Strategic,
)

COUNTING_CLUSTERS = (DEGENERATE_CLUSTER - 1, DEGENERATE_CLUSTER)
"""Ids that occur in the same clustering only if a judge counts up and does not skip `DEGENERATE_CLUSTER`."""


class ExactJudge:
    """Clusters generations by `task.strategy` or, if the task has no such method, by the outcomes of their episodes.

    Args:
      task: Determines the strategies, or starts the episodes.
      section: Section `judge` of the configuration. Not used.
      error_rate: Probability that a response with a strategy is assigned to one of N random clusters instead, to
        measure the effect of the errors of a judge. The errors of a group depend on its problem and its tokens only.
    """

    def __init__(
        self,
        task: Strategic | Interactive,
        section: JudgeKeys | None = None,
        *,
        error_rate: Annotated[float, FRACTION] = 0.0,
    ):
        self._task, self.parts, self._error_rate = task, (task,), error_rate

    async def cluster(self, group: Group) -> Clustering:
        """Returns one cluster per strategy. Generations without a strategy are in `DEGENERATE_CLUSTER`.

        Raises:
          ValueError: If the task returns a strategy that is not hashable, or that is or contains NaN.
        """
        strategies = self._strategies(group)
        try:
            clustering = clusters_of(strategies)
        except TypeError as error:
            raise ValueError(
                f"{type(self._task).__name__}.strategy returned a value for problem {group.problem.id!r} that cannot "
                f"be compared ({error}); return a string, number or tuple, or None for a degenerate response."
            ) from error
        return _with_errors(clustering.ids, group, self._error_rate) if self._error_rate else clustering

    def _strategies(self, group: Group) -> list[Any]:
        if isinstance(self._task, Strategic):
            return [self._task.strategy(group.problem, generation) for generation in group.generations]
        return [generation.outcome and generation.outcome.strategy for generation in group.generations]


def _with_errors(ids: Int[np.ndarray, " N"], group: Group, rate: float) -> Clustering:
    digest = hashlib.sha256(group.problem.id.encode(errors="surrogatepass"))
    for generation in group.generations:
        digest.update(generation.token_ids.tobytes() + b";")
    random = np.random.default_rng(np.frombuffer(digest.digest(), np.uint32))
    keys = np.where(random.random(len(ids)) < rate, random.integers(0, len(ids), len(ids)), ids).tolist()
    # Errors do not change which responses are degenerate.
    return clusters_of([None if id == DEGENERATE_CLUSTER else key for id, key in zip(ids, keys, strict=True)])


def clusters_of(keys: Sequence[Hashable | None]) -> Clustering:
    """Clusters responses by keys, such as their strategies or the first similar response.

    Args:
      keys: Equal keys for responses of the same cluster, and None for degenerate responses.

    Returns:
      The clusters, numbered from 0 by first appearance. Responses with the key None are in `DEGENERATE_CLUSTER`. Other
      keys never have an id in `COUNTING_CLUSTERS`, because clusterings that contain both of these ids are rejected.

    Raises:
      TypeError: If a key is not hashable.
      ValueError: If a key is not equal to itself, such as NaN or a tuple with NaN.
    """
    unused = (i for i in itertools.count() if i not in COUNTING_CLUSTERS)
    ids: dict[Hashable, int] = {None: DEGENERATE_CLUSTER}
    for key in keys:
        if key not in ids:
            if _has_nan(key):
                raise ValueError(
                    f"The key {key!r:.100} is or contains NaN, so responses with this key would not share a cluster; "
                    "use None for a degenerate response, or another value."
                )
            ids[key] = next(unused)
    return Clustering(np.array([ids[key] for key in keys], np.int32))


def _has_nan(key: Any) -> bool:
    """Returns True if a key, or a value in a tuple, is not equal to itself."""
    # A tuple with NaN equals itself, but not a tuple with another NaN.
    return any(map(_has_nan, key)) if isinstance(key, tuple | frozenset) else bool(key != key)
