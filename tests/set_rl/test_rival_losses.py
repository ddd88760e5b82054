"""Tests of GSPO, Clip-Cov and KL-Cov against values computed by hand and the definitions in verl."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poly_epo_jax.set_rl import Tokens, clip_cov_loss, gspo_loss, kl_cov_loss, ppo_clip_loss

# Two sequences of three tokens, then padding.
RATIO = np.array([1.0, 1.5, 0.5, 1.5, 0.5, 1.1])
ADVANTAGE = np.array([2.0, 2.0, 2.0, -1.0, -1.0, -1.0])
LOGPROB = np.log([0.5, 0.6, 0.1, 0.9, 0.2, 0.3])
MEANS = np.repeat([0.75 ** (1 / 3), 0.825 ** (1 / 3)], 3)  # geometric means of the ratios


def padded(values, fill=0.0):
    return jnp.asarray(np.append(values, fill), jnp.float32)


def two_sequences():
    old = LOGPROB - np.log(RATIO)
    weights = padded(np.full(6, 0.1))
    return Tokens(padded(LOGPROB), padded(old), padded(ADVANTAGE), weights, jnp.array([1, 1, 1, 2, 2, 2, 0]))


def many_tokens(seed=0, rows=4, length=64):
    """Returns rows of three sequences each, followed by padding."""
    rng = np.random.default_rng(seed)
    logprobs = -np.exp(rng.normal(size=(rows, length)))
    old = logprobs + rng.normal(0, 0.2, (rows, length))
    ids = np.tile(np.repeat([1, 2, 3, 0], length // 4), (rows, 1))
    advantages = 3 * rng.normal(size=(rows, 4))[np.arange(rows)[:, None], ids]
    weights = np.where(ids > 0, rng.random((rows, length)) + 0.1, 0)
    logprobs, old, advantages, weights = (jnp.asarray(x, jnp.float32) for x in (logprobs, old, advantages, weights))
    return Tokens(logprobs, old, advantages, weights, jnp.asarray(ids))


def gradient(loss, tokens):
    """Returns the gradient with respect to the log-probabilities."""
    return np.asarray(jax.jit(jax.grad(lambda logprobs: loss(tokens._replace(logprobs=logprobs))[0]))(tokens.logprobs))


def flat(tokens):
    """Returns the response mask, and logprobs, log ratios, advantages and weights of response tokens in float64."""
    is_response = np.asarray(tokens.weights) > 0
    arrays = tokens.logprobs, tokens.logprobs - tokens.old_logprobs, tokens.advantages, tokens.weights
    return is_response, *(np.asarray(array, np.float64)[is_response] for array in arrays)


def test_gspo_by_hand():
    """The ratios 0.91 and 0.94 are below 0.95, where the clip removes the gradient of the second sequence only."""
    loss, metrics = gspo_loss(two_sequences(), clip_low=0.05, clip_high=0.05)
    terms = [*MEANS[:3] * 2, *[-0.95] * 3]
    np.testing.assert_allclose(loss, -0.1 * np.sum(terms), rtol=1e-6)
    assert metrics["clip_fraction"] == 3
    np.testing.assert_allclose(metrics["ratio"], MEANS.sum(), rtol=1e-6)
    np.testing.assert_allclose(metrics["kl"], (RATIO - 1 - np.log(RATIO)).sum(), rtol=1e-6)
    expected = -0.1 * np.append(MEANS[:3] * 2, np.zeros(4))
    found = gradient(lambda tokens: gspo_loss(tokens, clip_low=0.05, clip_high=0.05), two_sequences())
    np.testing.assert_allclose(found, expected, atol=1e-7)


def test_gspo_equals_the_paper_if_weights_are_equal():
    """Compares with finite differences of min(s A, clip(s) A), where s is the ratio of a sequence."""
    tokens = two_sequences()

    def papers(logprobs):
        log_s = (logprobs - np.asarray(tokens.old_logprobs, np.float64)[:6]).reshape(2, 3).mean(axis=1)
        s, A = np.exp(log_s), np.array([2.0, -1.0])
        return -0.1 * 3 * np.minimum(s * A, np.clip(s, 0.8, 1.28) * A).sum()

    at = np.asarray(tokens.logprobs, np.float64)[:6]
    by_differences = [(papers(at + 1e-6 * step) - papers(at - 1e-6 * step)) / 2e-6 for step in np.eye(6)]
    np.testing.assert_allclose(gspo_loss(tokens)[0], papers(at), rtol=1e-6)
    np.testing.assert_allclose(gradient(gspo_loss, tokens)[:6], by_differences, rtol=1e-4)


def covariances(logprobs, advantages):
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def test_clip_cov_detaches_the_candidates_of_verl():
    """If all candidates are selected, the result is PPO's gradient without the tokens of high covariance."""
    tokens = many_tokens()
    is_response, logprobs, log_ratio, advantages, _ = flat(tokens)
    covariance, ratio = covariances(logprobs, advantages), np.exp(log_ratio)
    held_back = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.28) * advantages) < ratio * advantages
    is_candidate = (covariance > 1) & (covariance < 5) & ~held_back
    assert 10 < is_candidate.sum() < 100 and ((covariance > 5) & ~held_back).any()

    loss, metrics = clip_cov_loss(tokens, cov_fraction=1.0)
    assert metrics.pop("covariance_fraction") == is_candidate.sum()
    np.testing.assert_allclose(loss, ppo_clip_loss(tokens)[0], rtol=1e-6)
    assert metrics == ppo_clip_loss(tokens)[1]
    plain = gradient(ppo_clip_loss, tokens)
    found = gradient(lambda tokens: clip_cov_loss(tokens, cov_fraction=1.0), tokens)
    np.testing.assert_allclose(found[is_response], np.where(is_candidate, 0, plain[is_response]), rtol=1e-5)
    assert (found[~is_response] == 0).all()

    _, metrics = clip_cov_loss(tokens, cov_fraction=1.0, cov_low=2.0, cov_high=3.0)
    expected = (covariance > 2) & (covariance < 3) & ~held_back
    assert metrics["covariance_fraction"] == expected.sum() > 0


@pytest.mark.parametrize("loss", [clip_cov_loss, kl_cov_loss])
@pytest.mark.parametrize("advantage", ["several", "equal"])
def test_exactly_the_given_fraction_of_tokens_is_selected(loss, advantage):
    """If all advantages are equal, all covariances are 0. One token is selected at least."""
    options = {"cov_low": -1e6, "cov_high": 1e6} if loss is clip_cov_loss else {}
    tokens = many_tokens(rows=8, length=128)
    if advantage == "equal":
        tokens = tokens._replace(advantages=jnp.ones_like(tokens.advantages))
    candidates = 768  # response tokens, of which clip_cov excludes those that PPO clips
    if loss is clip_cov_loss:
        candidates -= int(ppo_clip_loss(tokens)[1]["clip_fraction"])
    for fraction, expected in ((1e-9, 1), (2e-4, 1), (1 / 256, 3), (0.02, 15), (0.25, 192), (1.0, candidates)):
        select = jax.jit(functools.partial(loss, cov_fraction=fraction, **options))
        assert select(tokens)[1]["covariance_fraction"] == expected, fraction


def test_clip_cov_selects_all_candidates_equally_often():
    """Equal inputs give equal selections. Other log-probabilities select other tokens."""
    gradients = jax.jit(
        jax.grad(lambda logprobs, tokens: clip_cov_loss(tokens._replace(logprobs=logprobs), **every)[0])
    )
    every = {"cov_fraction": 0.25, "cov_low": -1e6, "cov_high": 1e6}
    tokens = many_tokens()._replace(advantages=jnp.ones((4, 64)))  # a covariance of 0 for all tokens
    is_response = np.asarray(tokens.weights) > 0
    selected = []
    for seed in range(200):
        logprobs = jnp.asarray(-np.random.default_rng(seed).random((4, 64)), jnp.float32)
        on_policy = tokens._replace(old_logprobs=logprobs)
        selected.append((np.asarray(gradients(logprobs, on_policy)) == 0)[is_response])
        np.testing.assert_array_equal(gradients(logprobs, on_policy), gradients(logprobs, on_policy))
    counts = np.sum(selected, axis=0)
    assert (np.sum(selected, axis=1) == 48).all()
    assert np.abs(counts - 50).max() < 4.5 * np.sqrt(200 * 0.25 * 0.75)


@pytest.mark.parametrize("fraction", [0.05, 1e-9])
def test_kl_cov_equals_verl(fraction):
    tokens = many_tokens()
    is_response, logprobs, log_ratio, advantages, weights = flat(tokens)
    count = max(1, int(fraction * len(logprobs)))
    top = np.argsort(covariances(logprobs, advantages))[-count:]
    penalty = np.zeros(len(logprobs))
    penalty[top] = 0.7 * np.abs(log_ratio[top])
    loss, metrics = kl_cov_loss(tokens, cov_fraction=fraction, cov_kl_coef=0.7)
    np.testing.assert_allclose(loss, (weights * (penalty - advantages * np.exp(log_ratio))).sum(), rtol=1e-5)
    assert metrics["covariance_fraction"] == count and metrics["clip_fraction"] == 0
    np.testing.assert_allclose(metrics["ratio"], np.exp(log_ratio).sum(), rtol=1e-5)

    slope = np.zeros(len(logprobs))
    slope[top] = 0.7 * np.sign(log_ratio[top])
    found = gradient(lambda tokens: kl_cov_loss(tokens, cov_fraction=fraction, cov_kl_coef=0.7), tokens)
    expected = weights * (slope - advantages * np.exp(log_ratio))
    np.testing.assert_allclose(found[is_response], expected, rtol=1e-4, atol=1e-5)
    assert (found[~is_response] == 0).all()


@pytest.mark.parametrize("loss", [gspo_loss, clip_cov_loss, kl_cov_loss])
def test_the_loss_of_an_empty_microbatch_is_finite(loss):
    tokens = many_tokens()
    empty = tokens._replace(weights=jnp.zeros_like(tokens.weights))
    value, metrics = loss(empty)
    assert value == 0 and all(metric == 0 for metric in metrics.values())
    assert (gradient(loss, empty) == 0).all()
