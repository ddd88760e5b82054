"""Estimators for pass@k, or max@k of graded rewards: the score of a set of k generations is its maximum reward.

All estimators are exact over all C(N, k) sets, for any N, and form no sets. Let r_(0) <= .. <= r_(N-1) be the sorted
rewards of a prompt. The result of a generation is a sum over the steps r_(j) - r_(j-1) below its own reward, each times
a fraction of sets, which is a ratio of binomials. All terms are non-negative, so there is no cancellation.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from poly_epo_jax.set_rl.groups import Scalars, as_features, returns_kind_of_input, subtract_mean
from poly_epo_jax.set_rl.sets import check_set_size


@returns_kind_of_input
def pass_at_n_advantages(rewards: Scalars, set_size: int) -> Float[Array, "P N"]:
    """Computes the marginal set advantages of `pass_at_n` over all C(N, n) sets without forming them (paper §3).

    A = T - mean T, with T_(i) = sum_{j=1..i} (r_(j) - r_(j-1)) C(j-1, n-1) / C(N-1, n-1). For a given
    generation below step j, the weight of the step is the fraction of its sets that lie entirely below the step.

    Args:
      rewards: Rewards of the N generations of P prompts.
      set_size: Number n of generations in a set.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If not 1 <= set_size < N, or if `rewards` is invalid (see `as_features`).
    """
    (rewards,) = as_features(rewards=rewards)
    num_generations = rewards.shape[1]
    check_set_size(num_generations, set_size)
    return subtract_mean(_sum_of_steps(rewards, _fraction_below(num_generations, set_size)))


@returns_kind_of_input
def passk_advantages(rewards: Scalars, k: int) -> Float[Array, "P N"]:
    """Computes the advantages of pass@k training (Chen et al., arXiv 2508.10751).

    A_i = (E[max | i in the set] - E[max]) / std max, over all C(N, k) sets. For 0/1 rewards, c of them 1, let
    R = 1 - C(N-c, k) / C(N, k) and s = sqrt(R (1 - R)). Then A_i is (1 - R) / s for a correct generation and
    (1 - R - C(N-c-1, k-1) / C(N-1, k-1)) / s for an incorrect one. Without the division by s, this is
    `pass_at_n_advantages`.

    The authors' code (RUCAIBox/Passk_Training) adds 1e-6 to s and returns graded rewards unchanged as advantages. Here
    the definition also applies to graded rewards, and advantages are 0 if all sets of a prompt have the same score.

    Args:
      rewards: Rewards of the N generations of P prompts.
      k: Number of generations in a set.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If not 1 <= k < N, or if `rewards` is invalid (see `as_features`).
    """
    (rewards,) = as_features(rewards=rewards)
    advantages = pass_at_n_advantages(rewards, k)
    ascending = jnp.sort(jnp.asarray(rewards, float), axis=-1)
    shortfall = ascending[:, -1:] - ascending  # difference of the prompt's and the set's best reward
    share = jnp.asarray(_fraction_best(ascending.shape[-1], k), ascending.dtype)[None]
    mean = (share * shortfall).sum(axis=-1, keepdims=True)
    variance = (share * (shortfall - mean) ** 2).sum(axis=-1, keepdims=True)
    return jnp.where(variance > 0, advantages / jnp.sqrt(jnp.where(variance > 0, variance, 1)), 0)


@returns_kind_of_input
def pkpo_advantages(rewards: Scalars, k: int) -> Float[Array, "P N"]:
    """Computes the advantages of PKPO (Walder and Karkhanis, arXiv 2505.15201, equation 33).

    s_i = 1 / C(N, k) sum over the k-sets I that contain i of (max over I - max over I without i). This is the paper's
    estimator with a leave-one-out baseline of k - 1 generations. For sorted rewards,
    s_(i) = sum_{j=1..i} (r_(j) - r_(j-1)) C(j, k-1) / C(N, k). Sum_i s_i grad log pi(y_i) is an unbiased estimate of
    grad E[max of k]. No s_i is negative, and the s_i of the lowest reward is 0.

    The paper's listing computes the same result as the difference of two such transforms. The implementation of other
    authors in tajwarfahim/maxrl rounds rewards to 0 and 1, multiplies s by N / k, and subtracts the mean s of the other
    generations.

    Args:
      rewards: Rewards of the N generations of P prompts.
      k: Number of generations in a set.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If not 2 <= k <= N, or if `rewards` is invalid (see `as_features`).
    """
    (rewards,) = as_features(rewards=rewards)
    num_generations = rewards.shape[1]
    if not 2 <= k <= num_generations:
        raise ValueError(f"k={k} must lie between 2 and num_generations={num_generations}.")
    return _sum_of_steps(rewards, _fraction_best(num_generations, k)[1:])


def _sum_of_steps(rewards: Array, shares: Float[np.ndarray, " steps"]) -> Float[Array, "P N"]:
    """Adds up the steps from the lowest reward of a prompt to each generation's reward, each times its fraction."""
    rewards = jnp.asarray(rewards, float)
    order = jnp.argsort(rewards, axis=-1)
    steps = jnp.diff(jnp.take_along_axis(rewards, order, axis=-1), axis=-1)
    climbed = jnp.cumsum(steps * jnp.asarray(shares, rewards.dtype)[None], axis=-1)
    climbed = jnp.pad(climbed, ((0, 0), (1, 0)))
    return jnp.take_along_axis(climbed, jnp.argsort(order, axis=-1), axis=-1)


# Fractions of sets by the rank of a step or generation in ascending order. Counts are exact integers until the final
# division, because the binomials overflow floats for large N.


@functools.cache
def _fraction_below(N: int, k: int) -> Float[np.ndarray, " steps"]:
    """Returns the fraction of a generation's sets whose other members are among j - 1 given others, for j = 1..N-1."""
    return np.array([math.comb(j - 1, k - 1) / math.comb(N - 1, k - 1) for j in range(1, N)], float)


@functools.cache
def _fraction_best(N: int, k: int) -> Float[np.ndarray, " N"]:
    """Returns the fraction of all sets that consist of a given generation and k - 1 of j others, for j = 0..N-1.

    For the generation with j generations below it, this is the fraction of all sets in which it is the best.
    """
    return np.array([math.comb(j, k - 1) / math.comb(N, k) for j in range(N)], float)
