"""Tests of MaxRL, RS-GRPO and the entropic objective against hand-computed values and the authors' definitions."""

import math

import jax
import numpy as np
import pytest

from poly_epo_jax.set_rl import entropic_advantages, grpo_advantages, max_rl_advantages, rs_grpo_advantages

FAST_COMPILE = {"xla_backend_optimization_level": 0}
max_rl = jax.jit(max_rl_advantages, compiler_options=FAST_COMPILE)
rs_grpo = jax.jit(rs_grpo_advantages, static_argnames="beta", compiler_options=FAST_COMPILE)
entropic = jax.jit(entropic_advantages, static_argnames="kl", compiler_options=FAST_COMPILE)

LN2 = math.log(2)
REWARDS = np.random.default_rng(0).random((24, 8)).astype(np.float32)
REWARDS[::2] = REWARDS[::2] > np.linspace(0.1, 0.9, 12)[:, None]
MIXED = REWARDS[np.ptp(REWARDS, axis=1) > 0]


def test_max_rl_by_hand():
    rewards = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], np.float32)
    expected = [[3, -1, -1, -1], [1, 1, -1, -1], [0, 0, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(max_rl(rewards), expected, atol=1e-6)


def test_max_rl_equals_the_definition_of_its_authors():
    """The authors compute (r - mean) / (mean + 1e-6)."""
    mean = MIXED.astype(np.float64).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(max_rl(MIXED), (MIXED - mean) / (mean + 1e-6), rtol=1e-4, atol=1e-5)


def test_rs_grpo_by_hand():
    """One of four generations is correct: e^{beta r} is e^2, and its mean is (e^2 + 3) / 4."""
    rewards = np.array([[1, 0, 0, 0]], np.float32)
    mean = (math.e**2 + 3) / 4
    correct, incorrect = (math.e**2 / mean - 1) / 2, (1 / mean - 1) / 2
    np.testing.assert_allclose(rs_grpo(rewards, 2.0), [[correct, *[incorrect] * 3]], rtol=1e-5)


@pytest.mark.parametrize("beta", [0.5, 2.0, 8.0])
def test_rs_grpo_equals_the_definition_of_its_authors(beta):
    """The authors compute (exp(beta (r - soft)) - 1) / beta, where soft is log(mean of e^{beta r}) / beta."""
    rewards = REWARDS.astype(np.float64)
    soft = (np.log(np.exp(beta * rewards).sum(axis=1, keepdims=True)) - math.log(8)) / beta
    np.testing.assert_allclose(rs_grpo(REWARDS, beta), (np.exp(beta * (rewards - soft)) - 1) / beta, atol=1e-5)


def test_rs_grpo_is_grpo_for_small_beta():
    np.testing.assert_allclose(rs_grpo(REWARDS, 0.01), grpo_advantages(REWARDS), atol=0.01)


def entropic_by_its_authors(rewards, kl=LN2):
    """Computes the advantages of one prompt. beta is doubled until the divergence is reached, and then bisected."""
    rewards, N = rewards.astype(np.float64), len(rewards)

    def distance(beta):
        weights = np.exp(beta * (rewards - rewards.max()))
        q = weights / weights.sum()
        return (q[q > 0] * (np.log(q[q > 0]) + math.log(N))).sum()

    low, high = 0.0, 1.0
    while distance(high) < kl and high < 1e6:
        high *= 2
    if distance(high) >= kl:
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if distance(middle) < kl else (low, middle)
    weights = np.exp(high * (rewards - rewards.max()))
    return weights / ((weights.sum() - weights) / (N - 1) + 1e-12) - 1


@pytest.mark.parametrize("kl", [0.1, LN2, 1.0])
def test_entropic_equals_the_definition_of_its_authors(kl):
    expected = np.array([entropic_by_its_authors(row, kl) for row in REWARDS])
    np.testing.assert_allclose(entropic(REWARDS, kl), expected, rtol=1e-3, atol=1e-4)


def test_entropic_reaches_the_given_divergence():
    """The softmax weights that follow from the advantages have a divergence of ln 2 from the uniform distribution."""
    rewards = np.array([[1, 0, 0, 0, 0, 0, 0, 0]], np.float32)
    best, *others = (np.asarray(entropic(rewards, LN2), np.float64)[0] + 1).tolist()
    q = best / (best + 7)  # e^beta = best, because the other weights are e^0 = 1
    assert q * math.log(8 * q) + (1 - q) * math.log(8 * (1 - q) / 7) == pytest.approx(LN2, abs=1e-4)
    np.testing.assert_allclose(others, 1 / ((best + 6) / 7), rtol=1e-5)


def test_entropic_does_not_depend_on_scale_and_offset():
    np.testing.assert_allclose(entropic(MIXED * 0.01 + 0.5, LN2), entropic(MIXED, LN2), rtol=1e-2, atol=1e-3)


def test_several_best_generations_have_equal_advantages():
    """Five of eight generations have the maximum reward, so ln 2 is not reachable and the other weights approach 0."""
    rewards = np.array([[1, 1, 1, 1, 1, 0, 0, 0]], np.float32)
    np.testing.assert_allclose(entropic(rewards, LN2), [[7 / 4 - 1] * 5 + [-1] * 3], atol=1e-5)


def test_the_divergence_of_two_or_three_generations_is_limited_to_half_of_its_maximum():
    """At ln 2, the advantage of the better of two generations would be unbounded."""
    for N in (2, 3):
        rewards = np.eye(N, dtype=np.float32)[:1]
        best, other = np.asarray(entropic(rewards, LN2))[0, :2]
        assert 3 < best < 10 and -1 < other < 0
        np.testing.assert_array_equal(entropic(rewards, 10.0), entropic(rewards, LN2))
