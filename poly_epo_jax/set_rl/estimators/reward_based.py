"""Estimators that read only rewards, and give rarely solved prompts or rare correct generations a larger weight."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from poly_epo_jax.set_rl.groups import check_features, subtract_mean

_MAX_BETA = 2.0**14  # in units of 1 / (maximum - minimum reward of the prompt)
_BISECTION_STEPS = 50


def max_rl_advantages(rewards: Float[Array | np.ndarray, "P N"]) -> Float[Array, "P N"]:
    """Computes MaxRL's advantages (arXiv 2602.02710): A_i = (r_i - mean r) / mean r.

    Harder prompts have a larger weight. The authors' code (tajwarfahim/maxrl) adds 1e-6 to the mean, and sets the mean
    of a single generation to 0, so the advantage of a single generation is a million times its reward. Here, the
    advantages of prompts without a positive reward and of single generations are 0.

    Args:
      rewards: Rewards of the N generations of P prompts.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If a reward is NaN (detected outside jit only).
    """
    check_features(rewards=rewards)
    rewards = jnp.asarray(rewards)
    mean = rewards.mean(axis=-1, keepdims=True)
    return jnp.where(mean > 0, subtract_mean(rewards) / jnp.where(mean > 0, mean, 1), 0)


def rs_grpo_advantages(rewards: Float[Array | np.ndarray, "P N"], beta: float) -> Float[Array, "P N"]:
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
      ValueError: If a reward is NaN (detected outside jit only).
    """
    _, num_generations = check_features(rewards=rewards)
    share = jax.nn.softmax(beta * subtract_mean(jnp.asarray(rewards)), axis=-1)
    return subtract_mean(num_generations * share) / beta


def entropic_advantages(rewards: Float[Array | np.ndarray, "P N"], kl: float) -> Float[Array, "P N"]:
    """Computes advantages of the entropic objective of TTT-Discover (arXiv 2601.16175).

    A_i = e^{beta r_i} / mean over the others of e^{beta r_j} - 1. For each prompt, beta is chosen such that the KL
    divergence of softmax(beta r) from the uniform distribution over the N generations is `kl`. If several generations
    have the maximum reward, this divergence may be unreachable; beta then takes a very large value.

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
      ValueError: If a reward is NaN (detected outside jit only).
    """
    _, num_generations = check_features(rewards=rewards)
    rewards = jnp.asarray(rewards, float)
    if num_generations == 1:
        return jnp.zeros_like(rewards)
    best = rewards.max(axis=-1, keepdims=True)
    spread = best - rewards.min(axis=-1, keepdims=True)
    gaps = (rewards - best) / jnp.where(spread > 0, spread, 1)  # in [-1, 0], independent of the scale of the rewards
    target = min(kl, math.log(num_generations) / 2)

    def distance(steepness: Array) -> Array:
        log_share = jax.nn.log_softmax(steepness * gaps, axis=-1)
        return (jnp.exp(log_share) * log_share).sum(axis=-1, keepdims=True) + math.log(num_generations)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        is_far = distance(middle) >= target
        return jnp.where(is_far, low, middle), jnp.where(is_far, middle, high)

    bounds = jnp.zeros_like(best), jnp.full_like(best, _MAX_BETA)
    _, steepness = jax.lax.fori_loop(0, _BISECTION_STEPS, halve, bounds)
    weights = jnp.exp(steepness * gaps)
    others = (weights.sum(axis=-1, keepdims=True) - weights) / (num_generations - 1)
    return weights / others - 1
