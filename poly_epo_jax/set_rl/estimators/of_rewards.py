"""Estimators that read only rewards, and favour prompts or generations that are rarely solved."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from poly_epo_jax.set_rl.groups import centred, check_features

_STEEPEST = 2.0**14
_HALVINGS = 50


def max_rl_advantages(rewards: Float[Array | np.ndarray, "P N"]) -> Float[Array, "P N"]:
    """MaxRL (arXiv 2602.02710): A_i = (r_i - mean r) / mean r, so harder prompts weigh more.

    The authors' code (tajwarfahim/maxrl) adds 1e-6 to the mean, and uses 0 as the mean of a single generation, which
    makes its advantage a million times its reward. Here both a prompt without a reward and a single generation get 0.

    Raises:
      ValueError: on NaN rewards (detected outside jit only).
    """
    check_features(rewards=rewards)
    rewards = jnp.asarray(rewards)
    mean = rewards.mean(axis=-1, keepdims=True)
    return jnp.where(mean > 0, centred(rewards) / jnp.where(mean > 0, mean, 1), 0)


def rs_grpo_advantages(rewards: Float[Array | np.ndarray, "P N"], beta: float) -> Float[Array, "P N"]:
    """RS-GRPO (arXiv 2509.24261): A_i = (e^{beta r_i} / mean e^{beta r} - 1) / beta.

    The gradient of (1/beta) log E[e^{beta r}], which lies between the mean reward, as beta goes to 0, and the best one,
    as beta goes to infinity. The authors' code (Jackory/RS-GRPO) computes the same, from a log-sum-exp.

    Args:
      beta: above 0; the paper uses 2.

    Raises:
      ValueError: on NaN rewards (detected outside jit only).
    """
    _, num_generations = check_features(rewards=rewards)
    share = jax.nn.softmax(beta * centred(jnp.asarray(rewards)), axis=-1)
    return centred(num_generations * share) / beta


def entropic_advantages(rewards: Float[Array | np.ndarray, "P N"], kl: float) -> Float[Array, "P N"]:
    """The entropic objective of TTT-Discover (arXiv 2601.16175), with a beta of its own for every prompt.

    A_i = e^{beta r_i} / mean over the others of e^{beta r_j} - 1, where beta is such that softmax(beta r) is `kl` nats
    away from the uniform distribution over the N generations. If several are best, it may never get that far; beta is
    then practically infinite.

    The authors' code (test-time-training/discover, entropic_adaptive_beta) computes the same for N >= 4. The advantage
    of a single best generation grows without bound as its share goes to 1, and is a million million there for N = 2; so
    the distance here is at most half of log N, the largest possible one. Theirs is ln 2, which is half of log 4.

    Args:
      kl: above 0; the paper uses ln 2.

    Raises:
      ValueError: on NaN rewards (detected outside jit only).
    """
    _, num_generations = check_features(rewards=rewards)
    rewards = jnp.asarray(rewards, float)
    if num_generations == 1:
        return jnp.zeros_like(rewards)
    best = rewards.max(axis=-1, keepdims=True)
    spread = best - rewards.min(axis=-1, keepdims=True)
    gaps = (rewards - best) / jnp.where(spread > 0, spread, 1)  # from -1 to 0, whatever the rewards' scale
    target = min(kl, math.log(num_generations) / 2)

    def distance(steepness: Array) -> Array:
        log_share = jax.nn.log_softmax(steepness * gaps, axis=-1)
        return (jnp.exp(log_share) * log_share).sum(axis=-1, keepdims=True) + math.log(num_generations)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        is_far = distance(middle) >= target
        return jnp.where(is_far, low, middle), jnp.where(is_far, middle, high)

    bounds = jnp.zeros_like(best), jnp.full_like(best, _STEEPEST)
    _, steepness = jax.lax.fori_loop(0, _HALVINGS, halve, bounds)
    weights = jnp.exp(steepness * gaps)
    others = (weights.sum(axis=-1, keepdims=True) - weights) / (num_generations - 1)
    return weights / others - 1
