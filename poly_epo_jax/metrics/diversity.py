"""How many distinct strategies a prompt's generations show."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Float, Int

from poly_epo_jax.metrics import names
from poly_epo_jax.metrics.pass_at_k import pass_at_k
from poly_epo_jax.types import DEGENERATE_CLUSTER


def cluster_estimates(
    clusters: Int[np.ndarray, "P m"], correct: Bool[np.ndarray, "P m"], ks: Iterable[int]
) -> dict[str, Float[np.ndarray, " P"]]:
    """correct_clusters@k and incorrect_clusters@k of P prompts: distinct clusters among k generations, in expectation.

    `DEGENERATE_CLUSTER` is never counted among them.

    Args:
      clusters: cluster ids of the m generations of P prompts.
      correct: whether each is.
      ks: how many generations are drawn, at most m.
    """
    attempts = clusters != DEGENERATE_CLUSTER
    selections = {names.CORRECT_CLUSTERS: correct & attempts, names.INCORRECT_CLUSTERS: ~correct & attempts}
    return {
        names.at(stem, k): distinct_clusters(clusters, selected, k) for k in ks for stem, selected in selections.items()
    }


def degenerate_share(clusters: Int[np.ndarray, "P m"]) -> float:
    """The share of all generations that are no attempt at reasoning."""
    return float(1 - (clusters != DEGENERATE_CLUSTER).mean())


def distinct_clusters(
    clusters: Int[np.ndarray, "P m"], selected: Bool[np.ndarray, "P m"], k: int
) -> Float[np.ndarray, " P"]:
    """Expected number of clusters among the selected ones of k generations, drawn uniformly from a prompt's m.

    sum_c 1 - C(m - s_c, k) / C(m, k), with s_c the selected members of cluster c: each cluster is its own pass@k. With
    k = m it is the plain count (paper §6.1 and §6.2: clusters among correct generations, among incorrect ones).

    Args:
      clusters: cluster ids of the m generations of P prompts.
      selected: which generations count, say the correct ones. Leave degenerate ones out here: no id is special.
      k: how many generations are drawn, at most m.

    Raises:
      ValueError: unless 1 <= k <= m.
    """
    num_generations = clusters.shape[1]
    members = [np.unique(ids[keep], return_counts=True)[1] for ids, keep in zip(clusters, selected, strict=True)]
    return np.array([pass_at_k(num_generations, counts, k).sum() for counts in members])
