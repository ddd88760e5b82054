"""Estimators that favor generations in small clusters. `grpo_div_advantages` is the paper's baseline of this kind."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from poly_epo_jax.set_rl.groups import Scalars, as_features, cluster_sizes, rarity, returns_kind_of_input, subtract_mean
from poly_epo_jax.types import DEGENERATE_CLUSTER

_MIN_DISTINCT_FRACTION = 0.1  # minimum factor of DARLING, as in its authors' code


@returns_kind_of_input
def shaped_product_advantages(rewards: Scalars, clusters: Scalars) -> Float[Array, "P N"]:
    """Computes advantages from reward times diversity of single generations: centered r_i d_i (discussed in §5).

    d_i is `rarity`. The polychromic objective multiplies the mean reward and the diversity of a set instead. Its
    advantage therefore has a covariance term, and an incorrect generation can benefit from the correct generations in
    its sets. This estimator has neither property. `grpo_div_advantages` uses the sum instead of the product.

    Args:
      rewards: Rewards of the N generations of P prompts.
      clusters: Cluster ids of the generations.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If a feature is invalid (see `as_features`).
    """
    rewards, clusters = as_features(rewards=rewards, clusters=clusters)
    return subtract_mean(rewards * rarity(clusters))


@returns_kind_of_input
def darling_advantages(rewards: Scalars, clusters: Scalars) -> Float[Array, "P N"]:
    """Computes DARLING's advantages (arXiv 2509.02534): centered r_i max(0.1, (N - |cluster of i|) / (N - 1)).

    This follows the authors' code (facebookresearch/darling, `partition` and `multiplicative`), without a division by
    the standard deviation. A generation in `DEGENERATE_CLUSTER` always has the minimum factor of 0.1, which is our
    choice, so that rare degenerate responses earn no bonus.

    Args:
      rewards: Rewards of the N generations of P prompts.
      clusters: Cluster ids of the generations.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If a feature is invalid (see `as_features`).
    """
    rewards, clusters = as_features(rewards=rewards, clusters=clusters)
    num_generations = rewards.shape[1]
    distinct = (num_generations - cluster_sizes(clusters)) / max(num_generations - 1, 1)
    distinct = jnp.where(clusters == DEGENERATE_CLUSTER, 0.0, distinct)
    return subtract_mean(rewards * jnp.maximum(distinct, _MIN_DISTINCT_FRACTION))


@returns_kind_of_input
def uniqueness_advantages(rewards: Scalars, clusters: Scalars, alpha: float) -> Float[Array, "P N"]:
    """Computes the advantages of uniqueness-aware RL (Hu et al., arXiv 2601.08763).

    A_i = (r_i - mean r) / |cluster of i|^alpha. The weight also multiplies negative advantages, so that an incorrect
    generation with a common strategy is penalized less, as in the paper. The authors have not published their code or
    the alpha of their runs. The paper standardizes rewards, which is omitted here. In `DEGENERATE_CLUSTER`, the lower
    of the advantages for cluster sizes 1 and N is used, which is our choice.

    Args:
      rewards: Rewards of the N generations of P prompts.
      clusters: Cluster ids of the generations.
      alpha: Exponent of the cluster size. 0 gives GRPO's advantage.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If a feature is invalid (see `as_features`).
    """
    rewards, clusters = as_features(rewards=rewards, clusters=clusters)
    advantages = subtract_mean(rewards)
    weighted = advantages * cluster_sizes(clusters) ** -alpha
    smaller = jnp.minimum(advantages, advantages * rewards.shape[1] ** -alpha)
    return jnp.where(clusters == DEGENERATE_CLUSTER, smaller, weighted)
