"""Computes expectation and variance of gradient estimates with correlated generations: python benchmarks/correlated.py

A policy chooses one of 6 responses. Each has a reward of 0 or 1, and its own strategy. All groups of N generations are
enumerated: multinomial counts of the responses with independent generations, and with a shifted lattice by exact
integration over the shift, because the counts are constant between finitely many shifts. A gradient estimate is the
mean over generations of advantage times score (with respect to the logits).

The reference is the expectation with independent generations, for which the methods are designed. The gradients of 50
prompts with random policies are joined. Printed are the cosine of both expectations, the ratio of their lengths, and
the ratio of the total variances, each as correlated divided by independent.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np

from poly_epo_jax import set_rl

NUM_POLICIES, NUM_RESPONSES, NUM_GENERATIONS, SET_SIZE = 50, 6, 8, 4


def independent_counts(p: np.ndarray, num_generations: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the possible counts [S, V] of V responses in a group, and their probabilities [S]."""
    compositions = itertools.combinations(range(num_generations + len(p) - 1), len(p) - 1)
    counts = np.array([np.diff([-1, *bars, num_generations + len(p) - 1]) - 1 for bars in compositions])
    ways = [math.factorial(num_generations) / math.prod(map(math.factorial, row)) for row in counts.tolist()]
    return counts, np.array(ways) * np.prod(p**counts, axis=1)


def lattice_counts(p: np.ndarray, num_generations: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the possible counts [S, V] of V responses among the points of a shifted lattice, and probabilities [S].

    Counts change where a point passes the cumulative probability of a response.
    """
    ends = np.append(np.cumsum(p)[:-1], 1.0) * num_generations
    shifts = np.unique(np.concatenate([[0.0, 1.0], ends % 1]))
    middles, lengths = (shifts[1:] + shifts[:-1]) / 2, np.diff(shifts)
    before = np.ceil(ends[None] - middles[:, None])  # number of points below the end of each response
    return np.diff(before, axis=1, prepend=0).astype(int), lengths


def moments(
    p: np.ndarray, counts: np.ndarray, weights: np.ndarray, advantages: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, float]:
    """Returns the expectation [V] and the total variance of the gradient estimate.

    Args:
      p: Probabilities [V] of the responses.
      counts: Possible counts [S, V] of the responses in a group.
      weights: Probabilities [S] of the counts.
      advantages: Function that maps responses [S, N] to advantages [S, N].
    """
    responses = np.stack([np.repeat(np.arange(len(p)), row) for row in counts])
    estimates = np.einsum("sn,snv->sv", advantages(responses), np.eye(len(p))[responses] - p) / responses.shape[1]
    mean = weights @ estimates
    return mean, float(weights @ ((estimates - mean) ** 2).sum(axis=1))


def methods(rewards: np.ndarray) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Returns functions from responses [S, N] to advantages [S, N], by name."""

    def grpo(responses: np.ndarray) -> np.ndarray:
        return np.asarray(set_rl.grpo_advantages(rewards[responses]), np.float64)

    def leave_one_out(responses: np.ndarray) -> np.ndarray:
        return grpo(responses) * responses.shape[1] / (responses.shape[1] - 1)

    def polychromic(responses: np.ndarray) -> np.ndarray:
        clusters = responses.astype(np.int32) + 1
        return np.asarray(set_rl.polychromic_advantages(rewards[responses], clusters, set_size=SET_SIZE), np.float64)

    def pass_at_n(responses: np.ndarray) -> np.ndarray:
        return np.asarray(set_rl.pass_at_n_advantages(rewards[responses], set_size=SET_SIZE), np.float64)

    return {"GRPO": grpo, "leave-one-out": leave_one_out, "marginal set": polychromic, "pass@n": pass_at_n}


def compare(policies: np.ndarray, rewards: np.ndarray, num_generations: int) -> dict[str, tuple[float, float, float]]:
    """Returns cosine, ratio of lengths and ratio of variances of each method for prompts with policies [P, V]."""
    found = {}
    for name, advantages in methods(rewards).items():
        pairs = [
            [moments(p, *counts(p, num_generations), advantages) for p in policies]
            for counts in (independent_counts, lattice_counts)
        ]
        (expected, mean), variances = (np.array([[one[i] for one in row] for row in pairs]) for i in (0, 1))
        length, expected_length = np.linalg.norm(mean), np.linalg.norm(expected)
        before, after = variances.sum(axis=1)
        cosine = (mean * expected).sum() / length / expected_length
        found[name] = float(cosine), float(length / expected_length), float(after / before)
    return found


def main() -> None:
    """Prints a table in Markdown."""
    rng, rewards = np.random.default_rng(0), np.array([1, 0, 1, 0, 0, 0], np.float32)
    policies = rng.dirichlet(np.ones(NUM_RESPONSES), NUM_POLICIES)
    print("| advantages | cosine | length | variance |\n|---|---|---|---|")
    for name, values in compare(policies, rewards, NUM_GENERATIONS).items():
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in values)} |")


if __name__ == "__main__":
    main()
