"""Bandits whose arms are the responses of a prompt, and exact expectations over groups: none is sampled."""

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
"""(rewards, clusters) -> advantages, each [P, N]."""

NOVEL = 0  # the cluster of a response whose strategy no other has
CHUNK = 512  # groups at a time: closed forms keep [groups, N, N]


class Arms(NamedTuple):
    """What a policy may answer to a prompt: each arm's chance, reward and cluster."""

    chances: Float[np.ndarray, "*bandits A"]
    rewards: Float[np.ndarray, " A"]
    clusters: Int[np.ndarray, " A"]


def strategies(chances: Sequence[float], success: ArrayLike) -> Arms:
    """Strategies 1, 2, ..., each with a chance and a rate of success: an arm that is right, and one that is wrong.

    `success` [*bandits, S], strictly between 0 and 1, makes as many bandits, which differ in their arms' chances only.
    """
    right = np.array(chances) * np.asarray(success)
    ids = np.arange(1, len(chances) + 1)
    return Arms(
        chances=np.concatenate([right, np.array(chances) - right], axis=-1),
        rewards=np.concatenate([np.ones(len(ids)), np.zeros(len(ids))]),
        clusters=np.concatenate([ids, ids]),
    )


def all_groups(
    chances: Float[np.ndarray, "*bandits A"], size: int
) -> tuple[Int[np.ndarray, "groups size"], Float[np.ndarray, "*bandits groups"]]:
    """Every group of `size` arms, whatever its order, and how likely it is."""
    num_arms = chances.shape[-1]
    groups = np.array(list(itertools.combinations_with_replacement(range(num_arms), size)))
    counts = (groups[:, :, None] == np.arange(num_arms)).sum(axis=1)
    orders = np.array([math.lgamma(count + 1) for count in range(size + 1)])
    return groups, np.exp(orders[size] - orders[counts].sum(axis=1) + np.log(chances) @ counts.T)


def advantages_of(function: Advantages, rewards: np.ndarray, clusters: np.ndarray) -> Float[np.ndarray, "groups N"]:
    """In chunks of one shape, so that a function is compiled once for each N."""
    compiled, (num_groups, size) = _compiled(function), rewards.shape
    padded = -(-num_groups // CHUNK) * CHUNK, size
    rewards, clusters = (np.resize(values, padded).reshape(-1, CHUNK, size) for values in (rewards, clusters))
    return np.concatenate([np.asarray(compiled(r, c)) for r, c in zip(rewards, clusters, strict=True)])[:num_groups]


@functools.cache
def _compiled(function: Advantages) -> Advantages:
    return jax.jit(function)


class Credit(NamedTuple):
    """A response's advantage: its mean and standard deviation over the others of its group, of each bandit."""

    mean: Float[np.ndarray, "*bandits"]
    spread: Float[np.ndarray, "*bandits"]


def credit(function: Advantages, arms: Arms, num_generations: int, reward: float, cluster: int) -> Credit:
    """What a response with this reward and cluster gets, the others of its group drawn from the arms."""
    others, chances = all_groups(arms.chances, num_generations - 1)
    first = np.ones((len(others), 1))
    rewards = np.concatenate([reward * first, arms.rewards[others]], axis=1)
    clusters = np.concatenate([cluster * first.astype(int), arms.clusters[others]], axis=1)
    advantages = advantages_of(function, rewards, clusters)[:, 0]
    mean = chances @ advantages
    return Credit(mean, np.sqrt(np.maximum(chances @ advantages**2 - mean**2, 0)))


def typical_size(function: Advantages, arms: Arms, num_generations: int) -> Float[np.ndarray, "*bandits"]:
    """The root mean square of advantages, by which those of methods of different scales are compared."""
    groups, chances = all_groups(arms.chances, num_generations)
    advantages = advantages_of(function, arms.rewards[groups], arms.clusters[groups])
    return np.sqrt(chances @ (advantages**2).mean(axis=1))


class Gradient(NamedTuple):
    """Of a tabular softmax policy, with respect to its logits: sum_i A_i grad log pi(y_i) over a group."""

    mean: Float[np.ndarray, " A"]
    variance: float  # its trace


def gradient(function: Advantages, arms: Arms, num_generations: int) -> Gradient:
    groups, chances = all_groups(arms.chances, num_generations)
    advantages = advantages_of(function, arms.rewards[groups], arms.clusters[groups])
    scores = np.eye(len(arms.chances))[groups] - arms.chances
    estimates = (advantages[:, :, None] * scores).sum(axis=1)
    mean = chances @ estimates
    return Gradient(mean, float(chances @ ((estimates - mean) ** 2).sum(axis=1)))
