"""Set objectives f(x, y_1..y_n): what a set of n generations is worth as a whole (paper §3 and §4).

An objective maps features gathered over sets, each [..., K, n] or [..., K, n, D], to scores [..., K]. It is symmetric
in the n generations, and its parameters name the features it reads. Any such JAX function will do; OBJECTIVES are those
that have a name in a configuration.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from poly_epo_jax.set_rl.advantages import (
    ClosedForm,
    SetObjective,
    polychromic_advantages,
    reward_plus_diversity_advantages,
)
from poly_epo_jax.set_rl.estimators.best_of_k import pass_at_n_advantages
from poly_epo_jax.set_rl.estimators.of_embeddings import cosines, log_volume
from poly_epo_jax.types import DEGENERATE_CLUSTER, Registry


def polychromic(
    rewards: Float[Array | np.ndarray, "*prompts K n"],
    clusters: Int[Array | np.ndarray, "*prompts K n"],
) -> Float[Array, "*prompts K"]:
    """Mean reward times diversity: f = (1/n sum_i r_i) * |{C(y_1), .., C(y_n)}| / n (paper §4, Polychromic Objective).

    `DEGENERATE_CLUSTER` is never counted among the distinct clusters; the denominator stays n.
    """
    return jnp.mean(rewards, axis=-1) * diversity(clusters)


def reward_plus_diversity(
    rewards: Float[Array | np.ndarray, "*prompts K n"],
    clusters: Int[Array | np.ndarray, "*prompts K n"],
) -> Float[Array, "*prompts K"]:
    """The sum in place of polychromic's product: f = 1/n sum_i r_i + |{C(y_1), .., C(y_n)}| / n.

    Its marginal advantages are those of the two terms alone: reward shaping (paper §5) over sets. Whatever polychromic
    adds to this comes from the product. Over single generations, sum and product are GRPO+DIV and `shaped_product`.
    """
    return jnp.mean(rewards, axis=-1) + diversity(clusters)


def determinant(
    rewards: Float[Array | np.ndarray, "*prompts K n"],
    embeddings: Float[Array | np.ndarray, "*prompts K n D"],
) -> Float[Array, "*prompts K"]:
    """Mean reward times the volume of embeddings: f = (1/n sum_i r_i) * log2 det(I + K) / n, with K their cosines.

    The second factor is 1 if all are orthogonal and log2(1 + n) / n if all are alike. If embeddings say no more than
    the cluster, it is the sum over clusters c of log2(1 + |c|), divided by n: a repetition counts, but less.
    """
    volume = log_volume(cosines(embeddings)) / (embeddings.shape[-2] * math.log(2))
    return jnp.mean(rewards, axis=-1) * volume


def diversity(clusters: Int[Array | np.ndarray, "*prompts K n"]) -> Float[Array, "*prompts K"]:
    """Distinct clusters of a set divided by its size: d(G) of §4, without `DEGENERATE_CLUSTER`."""
    clusters = jnp.asarray(clusters)
    seen_before = jnp.tril(clusters[..., :, None] == clusters[..., None, :], -1).any(axis=-1)
    return (~seen_before & (clusters != DEGENERATE_CLUSTER)).mean(axis=-1)


def pass_at_n(rewards: Float[Array | np.ndarray, "*prompts K n"]) -> Float[Array, "*prompts K"]:
    """Best reward of the set: f = max_i r_i. For 0/1 rewards its expectation is pass@n."""
    return jnp.max(rewards, axis=-1)


def mean_reward(rewards: Float[Array | np.ndarray, "*prompts K n"]) -> Float[Array, "*prompts K"]:
    """Mean reward of the set: f = 1/n sum_i r_i.

    Over all sets it gives (N - n) / (n (N - 1)) times GRPO's advantage: standard RL at a smaller scale.
    """
    return jnp.mean(rewards, axis=-1)


class Objective(NamedTuple):
    """An entry of OBJECTIVES: f as `score`, and the method's title in reports.

    `closed_form` is a formula for the advantages [P, N] over all sets, if there is one. It takes the features by name
    and set_size, as `polychromic_advantages` does; without it every set is scored.
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
