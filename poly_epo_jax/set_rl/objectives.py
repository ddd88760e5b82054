"""Set objectives f(x, y_1..y_n): what a set of n generations is worth as a whole (paper §3 and §4).

An objective maps features gathered over sets, each [..., K, n] or [..., K, n, D], to scores [..., K]. It is symmetric
in the n generations, and its parameters name the features it reads. Any such JAX function serves; OBJECTIVES are those
that have a name in a configuration.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from poly_epo_jax.registry import Registry
from poly_epo_jax.set_rl.advantages import ClosedForm, SetObjective, polychromic_advantages
from poly_epo_jax.types import DEGENERATE_CLUSTER


def polychromic(
    rewards: Float[Array | np.ndarray, "*prompts K n"],
    clusters: Int[Array | np.ndarray, "*prompts K n"],
) -> Float[Array, "*prompts K"]:
    """Mean reward times diversity: f = (1/n sum_i r_i) * |{C(y_1), .., C(y_n)}| / n (paper §4, Polychromic Objective).

    `DEGENERATE_CLUSTER` is never counted among the distinct clusters; the denominator stays n.
    """
    clusters = jnp.asarray(clusters)
    seen_before = jnp.tril(clusters[..., :, None] == clusters[..., None, :], -1).any(axis=-1)
    diversity = (~seen_before & (clusters != DEGENERATE_CLUSTER)).mean(axis=-1)
    return jnp.mean(rewards, axis=-1) * diversity


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

    `closed_form`, where a formula gives the advantages [P, N] over all sets, takes the features by name and set_size,
    as `polychromic_advantages` does; without it every set is scored.
    """

    score: SetObjective
    title: str
    closed_form: ClosedForm | None = None


OBJECTIVES: Registry[Objective] = Registry(
    polychromic=Objective(polychromic, "Poly-EPO", polychromic_advantages),
    pass_at_n=Objective(pass_at_n, "set RL, pass@n"),
    mean_reward=Objective(mean_reward, "set RL, mean reward"),
)
