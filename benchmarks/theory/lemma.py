"""Tests lemma 5.1 of the paper on a tabular softmax policy, in expectation over groups.

The lemma describes the effect of one gradient step:

    log pi_new(y) - log pi(y) = alpha n pi(y) A(y) - alpha C,   A(y) = E[f | y] - E[f]

C = n sum_z pi(z)^2 A(z) is the same for all y. Our estimator averages over sets, so n is replaced by M n with
M = N/n - 1. The first term is the change of the logit. According to the paper, probability grows exactly if A > 0.
"""

import functools
from collections.abc import Callable

import numpy as np
from bandit import Arms, all_groups, gradient
from jaxtyping import Float

from poly_epo_jax import set_rl

NUM_GENERATIONS, SET_SIZE, NUM_BANDITS = 8, 4, 2000
ARMS = Arms(
    np.array([0.35, 0.2, 0.15, 0.15, 0.1, 0.05]),
    np.array([1.0, 0, 1, 0, 1, 0]),
    np.array([1, 1, 2, 2, 3, set_rl.DEGENERATE_CLUSTER]),
)
OBJECTIVES = {
    "polychromic": lambda rewards, clusters: set_rl.polychromic(rewards, clusters),
    "pass@n": lambda rewards, clusters: set_rl.pass_at_n(rewards),
    "mean reward": lambda rewards, clusters: set_rl.mean_reward(rewards),
}
ESTIMATORS: dict[str, Callable] = {
    "polychromic": set_rl.polychromic_advantages,
    "pass@n": lambda rewards, clusters, set_size: set_rl.pass_at_n_advantages(rewards, set_size),
    "mean reward": lambda rewards, clusters, set_size: set_rl.marginal_set_advantages(
        set_rl.mean_reward, set_rl.enumerate_sets(rewards.shape[1], set_size), rewards=rewards
    ),
}


def set_advantages(objective: Callable, arms: Arms, set_size: int) -> Float[np.ndarray, "*bandits A"]:
    """Computes A(y) = E[f | y] - E[f] for each arm from all sets.

    Args:
      objective: Set objective f.
      arms: Bandits.
      set_size: Number n of arms per set.

    Returns:
      The set advantage of each arm.
    """
    sets, chances = all_groups(arms.chances, set_size)
    weighted = chances * np.asarray(objective(arms.rewards[..., sets], arms.clusters[..., sets]))
    counts = (sets[:, :, None] == np.arange(arms.chances.shape[-1])).sum(axis=1)
    return weighted @ counts / (set_size * arms.chances) - weighted.sum(axis=-1, keepdims=True)


def shifts(logits: np.ndarray, step: np.ndarray) -> Float[np.ndarray, " A"]:
    """Returns the changes of log-probabilities if `step` is added to `logits`."""

    def log_softmax(values: np.ndarray) -> np.ndarray:
        return values - np.log(np.exp(values).sum())

    return log_softmax(logits + step) - log_softmax(logits)


def run() -> list[dict]:
    """Measures the error of the lemma at decreasing learning rates, and how often the predicted sign is incorrect."""
    rows = []
    for name, estimator in ESTIMATORS.items():
        found = gradient(functools.partial(estimator, set_size=SET_SIZE), ARMS, NUM_GENERATIONS).mean
        scale = (NUM_GENERATIONS / SET_SIZE - 1) * SET_SIZE
        logit_shift = scale * ARMS.chances * set_advantages(OBJECTIVES[name], ARMS, SET_SIZE)
        predicted = logit_shift - ARMS.chances @ logit_shift
        row = {"objective": name, "logit shift, largest error": np.abs(found / logit_shift - 1).max()}
        for rate in (1.0, 0.1, 0.01):
            measured = shifts(np.log(ARMS.chances), rate * found) / rate
            row[f"log-probability at rate {rate:g}"] = np.abs(measured - predicted).max() / np.abs(predicted).max()
        rows.append(row | _signs(OBJECTIVES[name]))
    return rows


def _signs(objective: Callable) -> dict[str, float]:
    """Computes how often the sign of A differs from the sign of the change of probability, in random bandits.

    The learning rate is infinitesimal.

    Returns:
      The fraction of the arms with A > 0 whose probability falls, and the fraction of the arms with A < 0 whose
      probability grows.
    """
    rng, shape = np.random.default_rng(0), (NUM_BANDITS, 6)
    rewards, clusters = rng.integers(0, 2, shape).astype(float), rng.integers(1, 4, shape)
    arms = Arms(rng.dirichlet(np.ones(6), NUM_BANDITS), rewards, clusters)
    advantages = set_advantages(objective, arms, SET_SIZE)
    shift = arms.chances * advantages - (arms.chances**2 * advantages).sum(axis=-1, keepdims=True)
    up, down = advantages > 1e-9, advantages < -1e-9
    return {
        "A > 0, probability falls": (up & (shift < 0)).sum() / up.sum(),
        "A < 0, probability grows": (down & (shift > 0)).sum() / down.sum(),
    }
