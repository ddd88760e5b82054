"""Estimators that reward generations of small clusters more; `grpo_div_advantages` is the paper's own of this kind."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from poly_epo_jax.set_rl.groups import centred, check_features, cluster_sizes, rarity
from poly_epo_jax.types import DEGENERATE_CLUSTER

_LEAST_DISTINCT = 0.1  # the authors' floor


def shaped_product_advantages(
    rewards: Float[Array | np.ndarray, "P N"], clusters: Int[Array | np.ndarray, "P N"]
) -> Float[Array, "P N"]:
    """Reward times diversity of single generations: centred r_i d_i (paper §5, which argues against it).

    d_i is `rarity`. The polychromic objective multiplies the same two things, but of a set: only there does the
    advantage have a covariance term, and only there can an incorrect generation benefit from the correct ones next to
    it. `grpo_div_advantages` is the sum in place of the product.

    Raises:
      ValueError: on NaN rewards (detected outside jit only); on mismatched shapes.
    """
    check_features(rewards=rewards, clusters=clusters)
    return centred(jnp.asarray(rewards) * rarity(jnp.asarray(clusters)))


def darling_advantages(
    rewards: Float[Array | np.ndarray, "P N"], clusters: Int[Array | np.ndarray, "P N"]
) -> Float[Array, "P N"]:
    """DARLING (arXiv 2509.02534): centred r_i max(0.1, (N - |cluster of i|) / (N - 1)), without a standard deviation.

    As in the authors' code (facebookresearch/darling, `partition` and `multiplicative`). A generation in
    `DEGENERATE_CLUSTER` gets the floor of 0.1, our choice: being rare does not make gibberish distinct.

    Raises:
      ValueError: on NaN rewards (detected outside jit only); on mismatched shapes.
    """
    _, num_generations = check_features(rewards=rewards, clusters=clusters)
    clusters = jnp.asarray(clusters)
    distinct = (num_generations - cluster_sizes(clusters)) / max(num_generations - 1, 1)
    distinct = jnp.where(clusters == DEGENERATE_CLUSTER, 0.0, distinct)
    return centred(jnp.asarray(rewards) * jnp.maximum(distinct, _LEAST_DISTINCT))


def uniqueness_advantages(
    rewards: Float[Array | np.ndarray, "P N"], clusters: Int[Array | np.ndarray, "P N"], alpha: float
) -> Float[Array, "P N"]:
    """Uniqueness-aware RL (Hu et al., arXiv 2601.08763): (r_i - mean r) / |cluster of i|^alpha.

    The weight also multiplies negative advantages, so that an incorrect generation of a common strategy is penalised
    less, as in the paper. There is no code by the authors, and we do not know the alpha of their runs; the paper
    standardises rewards, which we never do. A generation in `DEGENERATE_CLUSTER` gets the weight for a cluster of one
    or of N, whichever is worse for it: our choice.

    Raises:
      ValueError: on NaN rewards (detected outside jit only); on mismatched shapes.
    """
    _, num_generations = check_features(rewards=rewards, clusters=clusters)
    advantages, clusters = centred(jnp.asarray(rewards)), jnp.asarray(clusters)
    weighted = advantages * cluster_sizes(clusters) ** -alpha
    unpaid = jnp.minimum(advantages, advantages * num_generations**-alpha)
    return jnp.where(clusters == DEGENERATE_CLUSTER, unpaid, weighted)
