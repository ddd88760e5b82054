"""Estimators of pass@k, or max@k of graded rewards: a set of k generations is worth its best one.

All are exact over all C(N, k) sets, for any N, without forming a set. Sort a prompt's rewards, r_(0) <= .. <= r_(N-1).
A generation gets a sum over the steps r_(j) - r_(j-1) that lie below its own reward, each times a share of sets, which
is a ratio of binomials. No term is negative, so nothing cancels.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from poly_epo_jax.set_rl.groups import centred, check_features
from poly_epo_jax.set_rl.sets import check_set_size


def pass_at_n_advantages(rewards: Float[Array | np.ndarray, "P N"], set_size: int) -> Float[Array, "P N"]:
    """Marginal set advantages of `pass_at_n` over all C(N, n) sets, without forming a set (paper §3).

    A = T - mean T, with T_(i) = sum_{j=1..i} (r_(j) - r_(j-1)) C(j-1, n-1) / C(N-1, n-1): the weight of a step is the
    share of the sets with a given generation below the step whose n - 1 others are all below it too.

    Raises:
      ValueError: unless 1 <= set_size < N; on NaN rewards (detected outside jit only).
    """
    _, num_generations = check_features(rewards=rewards)
    check_set_size(num_generations, set_size)
    return centred(_climb(rewards, _beaten(num_generations, set_size)))


def passk_advantages(rewards: Float[Array | np.ndarray, "P N"], k: int) -> Float[Array, "P N"]:
    """Pass@k training (Chen et al., arXiv 2508.10751): a set of k scores its best reward; scores are standardised.

    A_i = (E[max | i in the set] - E[max]) / std max, over all C(N, k) sets. For 0/1 rewards with c correct ones, with
    R = 1 - C(N-c, k) / C(N, k) and s = sqrt(R (1 - R)), that is (1 - R) / s for a correct generation and
    (1 - R - C(N-c-1, k-1) / C(N-1, k-1)) / s for an incorrect one. Without the division it is `pass_at_n_advantages`.

    The authors' code (RUCAIBox/Passk_Training) adds 1e-6 to s and passes graded rewards through as advantages. Here the
    definition also applies to graded rewards, and a prompt whose sets are all worth the same gets 0.

    Raises:
      ValueError: unless 1 <= k < N; on NaN rewards (detected outside jit only).
    """
    advantages = pass_at_n_advantages(rewards, k)
    ascending = jnp.sort(jnp.asarray(rewards, float), axis=-1)
    shortfall = ascending[:, -1:] - ascending  # of a set, to the best reward of all
    share = jnp.asarray(_best(ascending.shape[-1], k), ascending.dtype)[None]
    mean = (share * shortfall).sum(axis=-1, keepdims=True)
    variance = (share * (shortfall - mean) ** 2).sum(axis=-1, keepdims=True)
    return jnp.where(variance > 0, advantages / jnp.sqrt(jnp.where(variance > 0, variance, 1)), 0)


def pkpo_advantages(rewards: Float[Array | np.ndarray, "P N"], k: int) -> Float[Array, "P N"]:
    """PKPO (Walder and Karkhanis, arXiv 2505.15201, equation 33): what a generation adds to the best of k.

    s_i = 1 / C(N, k) sum over k-sets I that hold i of (max over I - max over I without i), the paper's estimator with a
    leave-one-out baseline of k - 1 generations. Sorted, s_(i) = sum_{j=1..i} (r_(j) - r_(j-1)) C(j, k-1) / C(N, k).
    Sum_i s_i grad log pi(y_i) is an unbiased estimate of grad E[max of k]. No s_i is negative; the worst gets 0.

    The paper's listing takes the difference of two such transforms, with the same result. In tajwarfahim/maxrl, by
    other authors, rewards are rounded to 0 and 1, s is multiplied by N / k, and the mean of the others' s is
    subtracted.

    Raises:
      ValueError: unless 2 <= k <= N; on NaN rewards (detected outside jit only).
    """
    _, num_generations = check_features(rewards=rewards)
    if not 2 <= k <= num_generations:
        raise ValueError(f"k is {k}, but must lie between 2 and num_generations {num_generations}.")
    return _climb(rewards, _best(num_generations, k)[1:])


def _climb(rewards: Array | np.ndarray, shares: Float[np.ndarray, " steps"]) -> Float[Array, "P N"]:
    """The sum of steps from a prompt's lowest reward up to a generation's own, each times its share."""
    rewards = jnp.asarray(rewards, float)
    order = jnp.argsort(rewards, axis=-1)
    steps = jnp.diff(jnp.take_along_axis(rewards, order, axis=-1), axis=-1)
    climbed = jnp.cumsum(steps * jnp.asarray(shares, rewards.dtype)[None], axis=-1)
    climbed = jnp.pad(climbed, ((0, 0), (1, 0)))
    return jnp.take_along_axis(climbed, jnp.argsort(order, axis=-1), axis=-1)


# Shares by a step's or generation's place in ascending order. Integers are exact until the last division, because
# binomials of large N overflow any float.


@functools.cache
def _beaten(N: int, k: int) -> Float[np.ndarray, " steps"]:
    """Of the sets that hold a generation, the share whose k - 1 others are among the j - 1 lowest; j = 1..N-1."""
    return np.array([math.comb(j - 1, k - 1) / math.comb(N - 1, k - 1) for j in range(1, N)], float)


@functools.cache
def _best(N: int, k: int) -> Float[np.ndarray, " N"]:
    """Returns the fraction of all sets that join one generation with k - 1 of the j lowest, for j = 0..N-1.

    This is the fraction of the sets whose best generation has place j.
    """
    return np.array([math.comb(j, k - 1) / math.comb(N, k) for j in range(N)], float)
