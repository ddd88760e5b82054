"""Set objectives f(x, y_1, .., y_n), which score a set of n generations (paper §3 and §4).

An objective is a JAX function that maps features gathered over sets, each [..., K, n] or [..., K, n, D], to scores
[..., K]. It is symmetric in the n generations, and the names of its parameters select the features that it reads.
`OBJECTIVES` maps the names in a configuration to objectives.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Shaped

from poly_epo_jax.registry import Registry
from poly_epo_jax.set_rl.advantages import (
    ClosedForm,
    SetObjective,
    polychromic_advantages,
    reward_plus_diversity_advantages,
)
from poly_epo_jax.set_rl.estimators.best_of_k import pass_at_n_advantages
from poly_epo_jax.set_rl.estimators.embedding_based import cosines, log_volume
from poly_epo_jax.set_rl.groups import as_features, returns_kind_of_input
from poly_epo_jax.types import DEGENERATE_CLUSTER

SetScalars = Shaped[Array | np.ndarray, "*prompts K n"] | Sequence[Any]
SetEmbeddings = Shaped[Array | np.ndarray, "*prompts K n D"] | Sequence[Any]


@returns_kind_of_input
def polychromic(
    rewards: SetScalars,
    clusters: SetScalars,
) -> Float[Array, "*prompts K"]:
    """Scores sets by mean reward times diversity (paper §4, Polychromic Objective).

    f = (1/n sum_i r_i) * |{C(y_1), .., C(y_n)}| / n. `DEGENERATE_CLUSTER` is not counted among the distinct clusters,
    but the denominator remains n.

    Args:
      rewards: Rewards of the n generations of each set.
      clusters: Cluster ids of the n generations of each set.

    Returns:
      Scores of the sets.

    Raises:
      ValueError: If a feature is invalid (see `as_features`).
    """
    rewards, clusters = as_features(None, rewards=rewards, clusters=clusters)
    return jnp.mean(rewards, axis=-1) * diversity(clusters)


@returns_kind_of_input
def reward_plus_diversity(
    rewards: SetScalars,
    clusters: SetScalars,
) -> Float[Array, "*prompts K"]:
    """Scores sets by mean reward plus diversity: f = 1/n sum_i r_i + |{C(y_1), .., C(y_n)}| / n.

    The marginal set advantage is the sum of the advantages of the two terms: reward shaping (paper §5) over sets.
    Compared with `polychromic`, this objective isolates the effect of the product. For single generations, the sum is
    GRPO+DIV and the product is `shaped_product`.

    Args:
      rewards: Rewards of the n generations of each set.
      clusters: Cluster ids of the n generations of each set. `DEGENERATE_CLUSTER` is not counted.

    Returns:
      Scores of the sets.

    Raises:
      ValueError: If a feature is invalid (see `as_features`).
    """
    rewards, clusters = as_features(None, rewards=rewards, clusters=clusters)
    return jnp.mean(rewards, axis=-1) + diversity(clusters)


@returns_kind_of_input
def determinant(
    rewards: SetScalars,
    embeddings: SetEmbeddings,
) -> Float[Array, "*prompts K"]:
    """Scores sets by mean reward times the volume of the embeddings: f = (1/n sum_i r_i) * log2 det(I + K) / n.

    K holds the cosine similarities between the embeddings. The second factor is 1 if all embeddings are orthogonal and
    log2(1 + n) / n if all are equal. If the embeddings are one-hot cluster ids, it is the sum over clusters c of
    log2(1 + |c|), divided by n: a repeated cluster increases the factor less than a new one.

    Args:
      rewards: Rewards of the n generations of each set.
      embeddings: Embeddings of the n generations of each set, with D dimensions. Their lengths do not matter.

    Returns:
      Scores of the sets.

    Raises:
      ValueError: If a feature is invalid (see `as_features`).
    """
    rewards, embeddings = as_features(None, rewards=rewards, embeddings=embeddings)
    volume = log_volume(cosines(embeddings)) / (embeddings.shape[-2] * math.log(2))
    return jnp.mean(rewards, axis=-1) * volume


def diversity(clusters: SetScalars) -> Float[Array, "*prompts K"]:
    """Returns the number of distinct clusters of each set, without `DEGENERATE_CLUSTER`, divided by n: d(G) of §4.

    Args:
      clusters: Cluster ids of the n generations of each set.

    Raises:
      ValueError: If `clusters` is invalid (see `as_features`).
    """
    (clusters,) = as_features(None, clusters=clusters)
    seen_before = jnp.tril(clusters[..., :, None] == clusters[..., None, :], -1).any(axis=-1)
    return (~seen_before & (clusters != DEGENERATE_CLUSTER)).mean(axis=-1)


@returns_kind_of_input
def pass_at_n(rewards: SetScalars) -> Float[Array, "*prompts K"]:
    """Scores sets by their maximum reward: f = max_i r_i. For 0/1 rewards, the expectation of f is pass@n.

    Args:
      rewards: Rewards of the n generations of each set.

    Returns:
      Scores of the sets.

    Raises:
      ValueError: If a feature is invalid (see `as_features`).
    """
    (rewards,) = as_features(None, rewards=rewards)
    return jnp.max(rewards, axis=-1)


@returns_kind_of_input
def mean_reward(rewards: SetScalars) -> Float[Array, "*prompts K"]:
    """Scores sets by their mean reward: f = 1/n sum_i r_i.

    Over all sets, the marginal set advantage is GRPO's advantage times (N - n) / (n (N - 1)).

    Args:
      rewards: Rewards of the n generations of each set.

    Returns:
      Scores of the sets.

    Raises:
      ValueError: If a feature is invalid (see `as_features`).
    """
    (rewards,) = as_features(None, rewards=rewards)
    return jnp.mean(rewards, axis=-1)


class Objective(NamedTuple):
    """An entry of `OBJECTIVES`.

    Attributes:
      score: The objective f.
      title: Title of the method in reports.
      closed_form: Function that computes the advantages [P, N] over all sets without scoring each set. Its keyword
        arguments are the features and `set_size`, as for `polychromic_advantages`. If None, each set is scored.
    """

    score: SetObjective
    title: str
    closed_form: ClosedForm | None = None


OBJECTIVES: Registry[Objective] = Registry(
    polychromic=Objective(polychromic, "Poly-EPO", polychromic_advantages),
    pass_at_n=Objective(pass_at_n, "set RL, pass@n", pass_at_n_advantages),
    mean_reward=Objective(mean_reward, "set RL, mean reward"),
    reward_plus_diversity=Objective(
        reward_plus_diversity, "set RL, reward + diversity", reward_plus_diversity_advantages
    ),
    determinant=Objective(determinant, "set RL, determinant"),
)
"""Set objectives by the name that `algo.objective` selects. A configuration file can register further objectives."""
