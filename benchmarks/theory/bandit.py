"""Bandits whose arms are the possible responses to a prompt, with exact expectations over all groups."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

Values = jax.Array | np.ndarray
Advantages = Callable[[Values, Values], jax.Array]
"""Function (rewards, clusters) -> advantages of arrays [P, N]."""

NOVEL = 0  # Cluster of a response whose strategy no other response has.
CHUNK = 512  # Number of groups that are processed at once, because closed forms allocate arrays [groups, N, N].


class Arms(NamedTuple):
    """The possible responses to a prompt.

    Attributes:
      chances: Probability of each arm.
      rewards: Reward of each arm.
      clusters: Cluster of each arm.
    """

    chances: Float[np.ndarray, "*bandits A"]
    rewards: Float[np.ndarray, " A"]
    clusters: Int[np.ndarray, " A"]


def strategies(chances: Sequence[float], success: ArrayLike) -> Arms:
    """Creates bandits with one correct and one incorrect arm per strategy. Strategies are numbered from 1.

    Args:
      chances: Probability of each of S strategies.
      success: Success rates [*bandits, S], strictly between 0 and 1. Bandits differ only in the probabilities of arms.

    Returns:
      The bandits.
    """
    correct = np.array(chances) * np.asarray(success)
    ids = np.arange(1, len(chances) + 1)
    return Arms(
        chances=np.concatenate([correct, np.array(chances) - correct], axis=-1),
        rewards=np.concatenate([np.ones(len(ids)), np.zeros(len(ids))]),
        clusters=np.concatenate([ids, ids]),
    )


def all_groups(
    chances: Float[np.ndarray, "*bandits A"], size: int
) -> tuple[Int[np.ndarray, "groups size"], Float[np.ndarray, "*bandits groups"]]:
    """Lists all unordered groups of arms.

    Args:
      chances: Probability of each arm.
      size: Number of arms per group.

    Returns:
      The arms of each group, and the probability of each group.
    """
    num_arms = chances.shape[-1]
    groups = np.array(list(itertools.combinations_with_replacement(range(num_arms), size)))
    counts = (groups[:, :, None] == np.arange(num_arms)).sum(axis=1)
    orders = np.array([math.lgamma(count + 1) for count in range(size + 1)])
    return groups, np.exp(orders[size] - orders[counts].sum(axis=1) + np.log(chances) @ counts.T)


def advantages_of(function: Advantages, rewards: np.ndarray, clusters: np.ndarray) -> Float[np.ndarray, "groups N"]:
    """Computes advantages in chunks of equal shape, so that the function is compiled only once per N.

    Args:
      function: Advantage estimator.
      rewards: Rewards [groups, N].
      clusters: Clusters [groups, N].

    Returns:
      Advantages [groups, N].
    """
    compiled, (num_groups, size) = _compiled(function), rewards.shape
    padded = -(-num_groups // CHUNK) * CHUNK, size
    rewards, clusters = (np.resize(values, padded).reshape(-1, CHUNK, size) for values in (rewards, clusters))
    return np.concatenate([np.asarray(compiled(r, c)) for r, c in zip(rewards, clusters, strict=True)])[:num_groups]


@functools.cache
def _compiled(function: Advantages) -> Advantages:
    return jax.jit(function)


class Credit(NamedTuple):
    """Mean and standard deviation of a response's advantage over the other responses in its group, for each bandit."""

    mean: Float[np.ndarray, "*bandits"]
    spread: Float[np.ndarray, "*bandits"]


def credit(function: Advantages, arms: Arms, num_generations: int, reward: float, cluster: int) -> Credit:
    """Computes the advantage of a response if the other responses in its group are sampled from the arms.

    Args:
      function: Advantage estimator.
      arms: Bandits.
      num_generations: Number N of responses per group.
      reward: Reward of the response.
      cluster: Cluster of the response.

    Returns:
      Mean and standard deviation of the advantage.
    """
    others, chances = all_groups(arms.chances, num_generations - 1)
    first = np.ones((len(others), 1))
    rewards = np.concatenate([reward * first, arms.rewards[others]], axis=1)
    clusters = np.concatenate([cluster * first.astype(int), arms.clusters[others]], axis=1)
    advantages = advantages_of(function, rewards, clusters)[:, 0]
    mean = chances @ advantages
    return Credit(mean, np.sqrt(np.maximum(chances @ advantages**2 - mean**2, 0)))


def typical_size(function: Advantages, arms: Arms, num_generations: int) -> Float[np.ndarray, "*bandits"]:
    """Computes the root mean square (RMS) of advantages, which normalizes the scale of a method.

    Args:
      function: Advantage estimator.
      arms: Bandits.
      num_generations: Number N of responses per group.

    Returns:
      The RMS advantage of each bandit.
    """
    groups, chances = all_groups(arms.chances, num_generations)
    advantages = advantages_of(function, arms.rewards[groups], arms.clusters[groups])
    return np.sqrt(chances @ (advantages**2).mean(axis=1))


class Gradient(NamedTuple):
    """Gradient estimate sum_i A_i grad log pi(y_i) of a group, with respect to the logits of a tabular softmax policy.

    Attributes:
      mean: Expected gradient.
      variance: Trace of the covariance matrix.
    """

    mean: Float[np.ndarray, " A"]
    variance: float


def gradient(function: Advantages, arms: Arms, num_generations: int) -> Gradient:
    """Computes mean and variance of the gradient estimate.

    Args:
      function: Advantage estimator.
      arms: A single bandit.
      num_generations: Number N of responses per group.
    """
    groups, chances = all_groups(arms.chances, num_generations)
    advantages = advantages_of(function, arms.rewards[groups], arms.clusters[groups])
    scores = np.eye(len(arms.chances))[groups] - arms.chances
    estimates = (advantages[:, :, None] * scores).sum(axis=1)
    mean = chances @ estimates
    return Gradient(mean, float(chances @ ((estimates - mean) ** 2).sum(axis=1)))
