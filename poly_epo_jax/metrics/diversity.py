"""Number of distinct clusters among the generations of a problem."""

import itertools
import math

import numpy as np
from jaxtyping import Bool, Float, Int

from poly_epo_jax.metrics.pass_at_k import pass_at_k
from poly_epo_jax.types import DEGENERATE_CLUSTER


def correct_clusters(
    clusters: Int[np.ndarray, "P m"], correct: Bool[np.ndarray, "P m"], k: int
) -> Float[np.ndarray, " P"]:
    """Returns the expected number of distinct clusters of the correct generations among k generations.

    `DEGENERATE_CLUSTER` is not counted.

    Args:
      clusters: Cluster ids of the m generations of P problems.
      correct: Whether each generation is correct.
      k: Number of generations that are drawn, at most m.

    Raises:
      ValueError: If k is not in [1, m].
    """
    return distinct_clusters(clusters, correct & (clusters != DEGENERATE_CLUSTER), k)


def incorrect_clusters(
    clusters: Int[np.ndarray, "P m"], correct: Bool[np.ndarray, "P m"], k: int
) -> Float[np.ndarray, " P"]:
    """Returns the expected number of distinct clusters of the incorrect generations among k generations.

    `DEGENERATE_CLUSTER` is not counted.

    Args:
      clusters: Cluster ids of the m generations of P problems.
      correct: Whether each generation is correct.
      k: Number of generations that are drawn, at most m.

    Raises:
      ValueError: If k is not in [1, m].
    """
    return correct_clusters(clusters, ~correct, k)


def degenerate_share(clusters: Int[np.ndarray, "*P m"]) -> float:
    """Returns the fraction of generations in `DEGENERATE_CLUSTER`."""
    return float(1 - (clusters != DEGENERATE_CLUSTER).mean())


def distinct_clusters(
    clusters: Int[np.ndarray, "P m"], selected: Bool[np.ndarray, "P m"], k: int
) -> Float[np.ndarray, " P"]:
    """Returns the expected number of clusters of the selected generations among k generations drawn from m.

    The expectation is sum_c [1 - C(m - s_c, k) / C(m, k)], where s_c is the number of selected members of cluster c.
    Each term is `pass_at_k` with these members as the correct generations. With k = m, the sum is the number of
    clusters (paper §6.1 and §6.2: clusters among correct and among incorrect generations).

    Args:
      clusters: Cluster ids of the m generations of P problems.
      selected: Whether each generation is counted. Degenerate responses must be excluded here.
      k: Number of generations that are drawn uniformly without replacement, at most m.

    Returns:
      Expected number of clusters of each problem.

    Raises:
      ValueError: If not 1 <= k <= m.
    """
    num_generations = clusters.shape[1]
    members = [np.unique(ids[keep], return_counts=True)[1] for ids, keep in zip(clusters, selected, strict=True)]
    return np.array([pass_at_k(num_generations, counts, k).sum() for counts in members])


def num_clusters(ids: Int[np.ndarray, " N"]) -> int:
    """Returns the number of distinct clusters, without `DEGENERATE_CLUSTER`."""
    return len({*ids.tolist()} - {DEGENERATE_CLUSTER})


MAX_SETS = 5000
"""Number of sets from which `polychromic_value` is computed if there are more."""


def polychromic_value(rewards: Float[np.ndarray, " N"], clusters: Int[np.ndarray, " N"], set_size: int) -> float:
    """Returns the mean over sets of generations of mean reward times diversity (`set_rl.polychromic`).

    Args:
      rewards: Rewards of N generations.
      clusters: Cluster ids of the generations.
      set_size: Number n of generations per set, at most N. If there are more than `MAX_SETS` sets, random sets with a
        fixed seed are used.
    """
    count, size = len(rewards), min(set_size, len(rewards))
    if math.comb(count, size) <= MAX_SETS:
        sets = np.array([*itertools.combinations(range(count), size)])
    else:
        sets = np.argsort(np.random.default_rng(0).random((MAX_SETS, count)))[:, :size]
    ids = np.sort(clusters[sets])
    diversity = ((np.diff(ids, prepend=ids.min() - 1) != 0) & (ids != DEGENERATE_CLUSTER)).mean(axis=1)
    return float((rewards[sets].mean(axis=1) * diversity).mean())
