"""Estimators that read only rewards, and give rarely solved prompts or rare correct generations a larger weight."""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from poly_epo_jax.set_rl.groups import Scalars, as_features, returns_kind_of_input, subtract_mean

_MAX_BETA = 2.0**20  # as in the code of TTT-Discover, which doubles beta until it exceeds 1e6
_BISECTION_STEPS = 64


@returns_kind_of_input
def max_rl_advantages(rewards: Scalars) -> Float[Array, "P N"]:
    """Computes MaxRL's advantages (arXiv 2602.02710): A_i = (r_i - mean r) / mean r.

    Harder prompts have a larger weight. The authors' code (tajwarfahim/maxrl) adds 1e-6 to the mean, and sets the mean
    of a single generation to 0, so the advantage of a single generation is a million times its reward. Here, the
    advantages of prompts without a positive reward and of single generations are 0.

    Args:
      rewards: Rewards of the N generations of P prompts.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If `rewards` is invalid (see `as_features`).
    """
    (rewards,) = as_features(rewards=rewards)
    mean = rewards.mean(axis=-1, keepdims=True)
    return jnp.where(mean > 0, subtract_mean(rewards) / jnp.where(mean > 0, mean, 1), 0)


@returns_kind_of_input
def rs_grpo_advantages(rewards: Scalars, beta: float) -> Float[Array, "P N"]:
    """Computes RS-GRPO's advantages (arXiv 2509.24261): A_i = (e^{beta r_i} / mean e^{beta r} - 1) / beta.

    They follow the gradient of (1/beta) log E[e^{beta r}], which approaches the mean reward as beta goes to 0, and the
    maximum reward as beta goes to infinity. The authors' code (Jackory/RS-GRPO) computes the same result with a
    log-sum-exp.

    Args:
      rewards: Rewards of the N generations of P prompts.
      beta: Positive inverse temperature. The paper uses 2.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If `rewards` is invalid (see `as_features`).
    """
    (rewards,) = as_features(rewards=rewards)
    exponents = beta * (rewards - rewards.max(axis=-1, keepdims=True))
    mean = jnp.exp(exponents).mean(axis=-1, keepdims=True)
    return subtract_mean(jnp.expm1(exponents)) / (beta * mean)  # exactly 0 for equal rewards, unlike e^x / mean - 1


@returns_kind_of_input
def entropic_advantages(rewards: Scalars, kl: float) -> Float[Array, "P N"]:
    """Computes advantages of the entropic objective of TTT-Discover (arXiv 2601.16175).

    A_i = e^{beta r_i} / mean over the others of e^{beta r_j} - 1. For each prompt, beta is chosen such that the KL
    divergence of softmax(beta r) from the uniform distribution over the N generations is `kl`. If several generations
    have the maximum reward, this divergence may be unreachable; beta is then 2^20, as in the authors' code.

    The authors' code (test-time-training/discover, entropic_adaptive_beta) computes the same result for N >= 4 and
    kl = ln 2 = log(4) / 2. The advantage of a single best generation grows without bound as its softmax weight
    approaches 1; for N = 2 it reaches 1e12 in the authors' code. The divergence is therefore limited here to log(N) /
    2, half of its maximum.

    Args:
      rewards: Rewards of the N generations of P prompts.
      kl: Positive KL divergence, in nats. The paper uses ln 2.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If `rewards` is invalid (see `as_features`).
    """
    (rewards,) = as_features(rewards=rewards)
    rewards, num_generations = jnp.asarray(rewards, float), rewards.shape[1]
    if num_generations == 1:
        return jnp.zeros_like(rewards)
    gaps = rewards - rewards.max(axis=-1, keepdims=True)
    # The divergence is log(N / Z) + E[beta gap], where Z is the sum of the weights. If several generations are nearly
    # best, the divergence may reach the target on a plateau. Rounding errors of its difference from the target must
    # therefore be small. `level` is the value of Z at the target if the expectation is 0. The difference Z - level is
    # computed as a sum of small numbers plus the difference of the number of nearly best generations and `level`.
    level = num_generations * math.exp(-min(kl, math.log(num_generations) / 2))

    def is_reached(beta: Array) -> Array:
        exponents = beta * gaps
        weights, is_near = jnp.exp(exponents), exponents > -math.log(2)
        excess = jnp.where(is_near, jnp.expm1(exponents), weights).sum(axis=-1, keepdims=True)
        excess += is_near.sum(axis=-1, keepdims=True) - level
        mean = (weights * exponents).sum(axis=-1, keepdims=True) / weights.sum(axis=-1, keepdims=True)
        return mean >= jnp.log1p(excess / level)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        reached = is_reached(middle)
        return jnp.where(reached, low, middle), jnp.where(reached, middle, high)

    bounds = jnp.zeros_like(gaps[:, :1]), jnp.full_like(gaps[:, :1], _MAX_BETA)
    _, beta = jax.lax.fori_loop(0, _BISECTION_STEPS, halve, bounds)
    weights, small = jnp.exp(beta * gaps), jnp.expm1(beta * gaps)
    above = num_generations * small - small.sum(axis=-1, keepdims=True)  # N w - Z, exactly 0 for equal rewards
    return above / (weights.sum(axis=-1, keepdims=True) - weights)
