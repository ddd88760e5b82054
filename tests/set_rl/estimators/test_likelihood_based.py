"""Tests of the unlikeliness reward and UCPO against hand-computed values and the authors' definitions."""

import jax
import numpy as np
import pytest

from poly_epo_jax.set_rl import grpo_advantages, ucpo_advantages, unlikeliness_advantages

FAST_COMPILE = {"xla_backend_optimization_level": 0}
unlikeliness = jax.jit(unlikeliness_advantages, static_argnames="beta", compiler_options=FAST_COMPILE)
ucpo = jax.jit(ucpo_advantages, static_argnames="tau", compiler_options=FAST_COMPILE)

RNG = np.random.default_rng(0)
REWARDS = (RNG.random((20, 8)) < RNG.random((20, 1))).astype(np.float32)
LOGPROBS = -2 * RNG.random((20, 8)).astype(np.float32)


def test_unlikeliness_by_hand():
    """The most likely of four generations loses 3/4 of beta = 1/2 of its reward, and the least likely loses nothing."""
    rewards = np.array([[1, 1, 0, 1]], np.float32)
    logprobs = np.array([[-0.1, -0.4, -0.2, -0.3]], np.float32)
    shaped = np.array([1 - 0.5 * 3 / 4, 1, 0, 1 - 0.5 * 1 / 4])
    np.testing.assert_allclose(unlikeliness(rewards, logprobs, 0.5), [shaped - shaped.mean()], atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0])
def test_unlikeliness_equals_the_definition_of_its_authors(beta):
    """The authors rank by sorting twice, and then standardize the rewards, which is undone here."""
    ranks = LOGPROBS.argsort(axis=1).argsort(axis=1) / 8
    shaped = REWARDS.astype(np.float64) * (1 - ranks * beta)
    spread = shaped.std(axis=1, ddof=1, keepdims=True) + 1e-6
    theirs = (shaped - shaped.mean(axis=1, keepdims=True)) / spread
    np.testing.assert_allclose(unlikeliness(REWARDS, LOGPROBS, beta), theirs * spread, atol=1e-6)


def test_equally_likely_generations_have_equal_advantages():
    rewards, logprobs = np.ones((1, 4), np.float32), np.array([[-1, -0.5, -0.5, -0.5]], np.float32)
    ((first, *others),) = np.asarray(unlikeliness(rewards, logprobs, 0.25)).tolist()
    assert first > others[0] == others[1] == others[2]
    np.testing.assert_allclose(first - others[0], 0.25 * 2 / 4, atol=1e-6)  # the mean of ranks 1, 2 and 3


def test_ucpo_by_hand():
    """Two of four are correct, one of them e times as likely. Half of their advantage is divided as 1 to e."""
    rewards = np.array([[1, 0, 1, 0]], np.float32)
    logprobs = np.array([[-2, -9, -1, 0]], np.float32)
    rare, common = np.e / (1 + np.e), 1 / (1 + np.e)
    expected = [0.5 * 2 * (0.25 + 0.5 * rare), -0.5, 0.5 * 2 * (0.25 + 0.5 * common), -0.5]
    np.testing.assert_allclose(ucpo(rewards, logprobs, 0.5), [expected], rtol=1e-5)


@pytest.mark.parametrize("tau", [0.2, 0.3, 1.0])
def test_ucpo_equals_the_definition_of_its_authors(tau):
    """The authors standardize advantages, which is undone here, and redistribute those of correct ones by 1 / q."""
    for rewards, logprobs in zip(REWARDS.astype(np.float64), LOGPROBS.astype(np.float64), strict=True):
        spread = rewards.std(ddof=1) + 1e-8
        theirs = (rewards - rewards.mean()) / spread
        correct = rewards > 0
        if correct.sum() > 1:
            q = np.exp(logprobs[correct]) / np.exp(logprobs[correct]).sum()
            target = 1 / q / (1 / q).sum()
            theirs[correct] *= ((1 - tau) / correct.sum() + tau * target) * correct.sum()
        ours = ucpo(rewards[None].astype(np.float32), logprobs[None].astype(np.float32), tau)
        np.testing.assert_allclose(ours, theirs[None] * spread, atol=1e-6)


def test_ucpo_preserves_the_sum_of_positive_advantages():
    """For graded rewards, the sum of positive advantages and the negative advantages equal GRPO's."""
    rewards = np.random.default_rng(1).random((20, 8)).astype(np.float32)
    shared, plain = np.asarray(ucpo(rewards, LOGPROBS, 0.7)), np.asarray(grpo_advantages(rewards))
    np.testing.assert_allclose(shared.sum(axis=1), 0, atol=1e-6)
    np.testing.assert_array_equal(shared[plain <= 0], plain[plain <= 0])
    assert (shared[plain > 0] > 0).all() and np.abs(shared - plain).max() > 0.1
    np.testing.assert_allclose(ucpo(rewards, LOGPROBS, 0.0), plain, atol=1e-7)


def test_a_response_of_negligible_likelihood_gets_the_whole_redistributed_advantage():
    rewards, logprobs = np.array([[1, 1, 0]], np.float32), np.array([[-1e4, -0.1, -0.1]], np.float32)
    np.testing.assert_allclose(ucpo(rewards, logprobs, 1.0), [[2 / 3, 0, -2 / 3]], atol=1e-6)
