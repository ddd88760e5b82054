"""Set objectives f(x, y_1..y_n): what a set of n generations is worth as a whole (paper §3 and §4).

An objective maps features gathered over sets, each [..., K, n] or [..., K, n, D], to scores [..., K]. It is symmetric
in the n generations, names the features it uses and ignores the rest. Any such JAX function serves; these are the ones
that have a name in a config.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Shaped

from poly_epo_jax.types import DEGENERATE_CLUSTER

SetObjective = Callable[..., Float[Array, "*prompts K"]]


def polychromic(
    rewards: Float[Array | np.ndarray, "*prompts K n"],
    clusters: Int[Array | np.ndarray, "*prompts K n"],
    **unused: Shaped[Array | np.ndarray, "..."],
) -> Float[Array, "*prompts K"]:
    """Mean reward times diversity: f = (1/n sum_i r_i) * |{C(y_1), .., C(y_n)}| / n (paper §4, Polychromic Objective).

    `DEGENERATE_CLUSTER` is never counted among the distinct clusters; the denominator stays n.
    """
    clusters = jnp.asarray(clusters)
    seen_before = jnp.tril(clusters[..., :, None] == clusters[..., None, :], -1).any(axis=-1)
    diversity = (~seen_before & (clusters != DEGENERATE_CLUSTER)).mean(axis=-1)
    return jnp.mean(rewards, axis=-1) * diversity


def pass_at_n(
    rewards: Float[Array | np.ndarray, "*prompts K n"], **unused: Shaped[Array | np.ndarray, "..."]
) -> Float[Array, "*prompts K"]:
    """Best reward of the set: f = max_i r_i. For 0/1 rewards its expectation is pass@n."""
    return jnp.max(rewards, axis=-1)


def mean_reward(
    rewards: Float[Array | np.ndarray, "*prompts K n"], **unused: Shaped[Array | np.ndarray, "..."]
) -> Float[Array, "*prompts K"]:
    """Mean reward of the set: f = 1/n sum_i r_i.

    Over all sets it gives (N - n) / (n (N - 1)) times GRPO's advantage: standard RL at a smaller scale.
    """
    return jnp.mean(rewards, axis=-1)


OBJECTIVES: dict[str, SetObjective] = {
    "polychromic": polychromic,
    "pass_at_n": pass_at_n,
    "mean_reward": mean_reward,
}
