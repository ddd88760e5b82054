"""Tests that E[sum_i grad log pi(y_i) A_marg(y_i)] = M grad E[f] with M = (N/n) q - 1 (paper, proposition 3.1)."""

import itertools
import math

import jax
import numpy as np
import pytest

from poly_epo_jax.set_rl import (
    DEGENERATE_CLUSTER,
    enumerate_sets,
    marginal_set_advantages,
    polychromic,
    polychromic_advantages,
    sample_sets,
)

N, n = 5, 3
NUM_DRAWS = 200_000
# A softmax policy over five outcomes with rewards and clusters.
LOGITS = np.array([0.5, -0.3, 0.0, 0.8, -0.5])
POLICY = np.exp(LOGITS) / np.exp(LOGITS).sum()
REWARDS = np.array([1.0, 1.0, 0.0, 0.0, 0.5])
CLUSTERS = np.array([1, 2, 1, 3, DEGENERATE_CLUSTER])


def exact_gradient():
    """Computes grad E[f] with respect to the logits from all 5^n ordered sets."""
    gradient = np.zeros(len(LOGITS))
    for outcomes in itertools.product(range(len(LOGITS)), repeat=n):
        ids = {int(CLUSTERS[y]) for y in outcomes} - {DEGENERATE_CLUSTER}
        score = np.mean([REWARDS[y] for y in outcomes]) * len(ids) / n
        grad_log_probability = sum(np.eye(len(LOGITS))[y] - POLICY for y in outcomes)
        gradient += np.prod([POLICY[y] for y in outcomes]) * score * grad_log_probability
    return gradient


def enumerated(rewards, clusters):
    return marginal_set_advantages(polychromic, enumerate_sets(N, n), rewards=rewards, clusters=clusters)


def closed_form(rewards, clusters):
    return polychromic_advantages(rewards, clusters, n)


def sampled(num_sets):
    def advantages(rewards, clusters):
        keys = jax.random.split(jax.random.key(0), len(rewards))
        sets = jax.vmap(lambda key: sample_sets(key, N, n, num_sets))(keys)
        return marginal_set_advantages(polychromic, sets, rewards=rewards, clusters=clusters)

    return advantages


@pytest.mark.parametrize(
    ("advantages_of", "num_sets"),
    [(enumerated, 10), (closed_form, 10), (sampled(2), 2), (sampled(4), 4)],
    ids=["all sets", "closed form", "2 sampled sets", "4 sampled sets"],
)
def test_gradient_is_unbiased_up_to_the_factor_of_the_paper(advantages_of, num_sets):
    outcomes = np.random.default_rng(0).choice(len(LOGITS), size=(NUM_DRAWS, N), p=POLICY)
    rewards, clusters = REWARDS[outcomes].astype(np.float32), CLUSTERS[outcomes]
    advantages = np.asarray(jax.jit(advantages_of)(rewards, clusters), np.float64)
    estimates = np.einsum("ri,rio->ro", advantages, np.eye(len(LOGITS))[outcomes] - POLICY)

    # The probability that a generation is in at least one of the K sets.
    q = 1 - math.comb(math.comb(N - 1, n), num_sets) / math.comb(math.comb(N, n), num_sets)
    target = (N / n * q - 1) * exact_gradient()
    standard_error = estimates.std(axis=0) / math.sqrt(NUM_DRAWS)
    assert np.abs(target).max() > 20 * standard_error.max()  # the standard error is small enough for the comparison
    assert (np.abs(estimates.mean(axis=0) - target) < 4 * standard_error).all()


def test_a_single_set_gives_zero_advantages():
    rewards = np.random.default_rng(1).random((16, N)).astype(np.float32)
    advantages = jax.jit(sampled(1))(rewards, np.zeros((16, N), np.int32))
    np.testing.assert_allclose(advantages, 0, atol=1e-7)  # M = (N/n)(n/N) - 1 = 0
