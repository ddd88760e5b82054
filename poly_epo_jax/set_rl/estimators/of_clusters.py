"""Estimators that pay a generation of a small cluster more. `grpo_div_advantages` is the paper's own of this kind."""

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

    d_i is `rarity`. The polychromic objective multiplies the same two things, but of a set: so only there has the
    advantage a covariance term, and only there can an incorrect generation earn from the correct ones beside it.
    `grpo_div_advantages` is the sum in place of the product.

    Raises:
      ValueError: on NaN rewards (seen outside jit only); on mismatched shapes.
    """
    check_features(rewards=rewards, clusters=clusters)
    return centred(jnp.asarray(rewards) * rarity(jnp.asarray(clusters)))


def darling_advantages(
    rewards: Float[Array | np.ndarray, "P N"], clusters: Int[Array | np.ndarray, "P N"]
) -> Float[Array, "P N"]:
    """DARLING (arXiv 2509.02534): centred r_i max(0.1, (N - |cluster of i|) / (N - 1)), without a standard deviation.

    As in the authors' code (facebookresearch/darling, `partition` and `multiplicative`). A generation in
    `DEGENERATE_CLUSTER` gets the floor of 0.1, our choice: gibberish is not distinct for being rare.

    Raises:
      ValueError: on NaN rewards (seen outside jit only); on mismatched shapes.
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

    The weight also multiplies negative advantages, so that an incorrect generation of a common strategy is held back
    less, as in the paper. There is no authors' code, and no alpha of their runs is known to us; the paper standardises
    rewards, which we never do. A generation in `DEGENERATE_CLUSTER` gets, of the weights for a cluster of one and of N,
    the worse for it: our choice.

    Raises:
      ValueError: on NaN rewards (seen outside jit only); on mismatched shapes.
    """
    _, num_generations = check_features(rewards=rewards, clusters=clusters)
    advantages, clusters = centred(jnp.asarray(rewards)), jnp.asarray(clusters)
    weighted = advantages * cluster_sizes(clusters) ** -alpha
    unpaid = jnp.minimum(advantages, advantages * num_generations**-alpha)
    return jnp.where(clusters == DEGENERATE_CLUSTER, unpaid, weighted)
