"""Agreement of two clusterings of the same responses: adjusted Rand index and V-measure."""

import numpy as np
from jaxtyping import Int

from poly_epo_jax.types import DEGENERATE_CLUSTER

RAND_BOUNDS = (-0.5, 1.0)
"""Smallest and largest adjusted Rand index."""


def adjusted_rand_index(first: Int[np.ndarray, " N"], second: Int[np.ndarray, " N"]) -> float:
    """Returns the adjusted Rand index of two clusterings (Hubert and Arabie 1985).

    The Rand index, the fraction of pairs of responses that both clusterings join or both separate, is shifted and
    scaled so that random clusterings with the same cluster sizes have expectation 0, and equal clusterings have 1. The
    value is -0.5 or greater.

    Args:
      first: Cluster ids of N responses. Only their equality matters.
      second: Cluster ids of the same responses.
    """
    joined, in_first, in_second = (_num_pairs(counts) for counts in _counts(first, second))
    if joined == in_first == in_second:  # equal clusterings, including those without pairs
        return 1.0
    expected = in_first * in_second / _num_pairs(np.array([len(first)]))
    return float((joined - expected) / ((in_first + in_second) / 2 - expected))


def pairwise_agreement(first: Int[np.ndarray, " N"], second: Int[np.ndarray, " N"]) -> float:
    """Returns the fraction of pairs of responses that both clusterings join or both separate (Rand index).

    Args:
      first: Cluster ids of N >= 2 responses. Only their equality matters.
      second: Cluster ids of the same responses.
    """
    joined, in_first, in_second = (_num_pairs(counts) for counts in _counts(first, second))
    return 1 - (in_first + in_second - 2 * joined) / _num_pairs(np.array([len(first)]))


def v_measure(first: Int[np.ndarray, " N"], second: Int[np.ndarray, " N"]) -> float:
    """Returns the V-measure of two clusterings (Rosenberg and Hirschberg 2007), which is symmetric.

    It is the harmonic mean of homogeneity and completeness, which equals 2 I / (H1 + H2), where H1 and H2 are the
    entropies of the two clusterings and I is their mutual information. It is 1 for equal clusterings, and is not
    adjusted for chance: clusterings with many clusters have high values.

    Args:
      first: Cluster ids of N responses. Only their equality matters.
      second: Cluster ids of the same responses.
    """
    joint, in_first, in_second = (entropy(counts) for counts in _counts(first, second))
    total = in_first + in_second
    return float(np.clip(2 * (total - joint) / total, 0, 1)) if total else 1.0


def degenerate_as_singletons(ids: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Returns cluster ids in which each response of `DEGENERATE_CLUSTER` is its own cluster.

    Degenerate responses share no strategy. As one cluster, they would increase the agreement of all judges that detect
    them.

    Args:
      ids: Cluster ids of N responses.
    """
    return np.where(ids == DEGENERATE_CLUSTER, ids.max(initial=0) + 1 + np.arange(len(ids)), ids)


def _counts(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the sizes of the intersections of clusters, of the first clusters, and of the second clusters."""
    columns = (np.stack([first, second], axis=1), first, second)
    joint, in_first, in_second = (np.unique(ids, axis=0, return_counts=True)[1] for ids in columns)
    return joint, in_first, in_second


def _num_pairs(counts: np.ndarray) -> int:
    return int((counts * (counts - 1) // 2).sum())


def entropy(counts: Int[np.ndarray, " clusters"]) -> float:
    """Returns the entropy of a clustering in nats, from the positive sizes of its clusters."""
    return float(np.sum(counts / counts.sum() * np.log(counts.sum() / counts)))
