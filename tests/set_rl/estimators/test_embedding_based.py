"""Tests of embedding-based estimators against hand-computed values, determinants and the authors' definitions."""

import itertools
import math

import jax
import numpy as np
import pytest

from poly_epo_jax.set_rl import (
    dqo_advantages,
    grpo_advantages,
    rep_exp_advantages,
    set_dpp_advantages,
    set_po_advantages,
)

FAST_COMPILE = {"xla_backend_optimization_level": 0}
rep_exp = jax.jit(rep_exp_advantages, static_argnames=("beta", "ridge"), compiler_options=FAST_COMPILE)
dqo = jax.jit(dqo_advantages, static_argnames="weight", compiler_options=FAST_COMPILE)
set_dpp = jax.jit(set_dpp_advantages, static_argnames="scale", compiler_options=FAST_COMPILE)
set_po = jax.jit(set_po_advantages, static_argnames="weight", compiler_options=FAST_COMPILE)

RNG = np.random.default_rng(0)
P, N, D = 6, 8, 5
REWARDS = RNG.random((P, N)).astype(np.float32)
REWARDS[::2] = REWARDS[::2] > 0.5
EMBEDDINGS = RNG.normal(size=(P, N, D)).astype(np.float32)
EMBEDDINGS[:, 3] = EMBEDDINGS[:, 2]  # a repeated response
ORTHOGONAL = np.eye(N, dtype=np.float32)[None]
BINARY = np.array([[1, 0, 1, 0, 0, 1, 0, 0]], np.float32)


def less_mean(values):
    values = np.array(values, np.float64)
    return values - values.mean(axis=-1, keepdims=True)


def cosines_of(embeddings):
    unit = embeddings.astype(np.float64) / np.linalg.norm(embeddings.astype(np.float64), axis=-1, keepdims=True)
    return unit @ unit.T


def gains_of(kernel):
    """Computes each gain from two determinants."""
    others = [np.delete(np.arange(len(kernel)), i) for i in range(len(kernel))]
    whole = np.linalg.slogdet(np.eye(len(kernel)) + kernel)[1]
    return [whole - np.linalg.slogdet((np.eye(len(kernel)) + kernel)[np.ix_(rest, rest)])[1] for rest in others]


def rep_exp_by_its_authors(embeddings, ridge):
    """Computes the bonuses of one prompt from the inverse covariance of centered embeddings, by rank-one updates."""
    embeddings = embeddings.astype(np.float64)
    embeddings = embeddings - embeddings.mean(axis=0)
    inverse = np.eye(embeddings.shape[1]) / ridge
    for e in embeddings:
        inverse = inverse - np.outer(inverse @ e, e @ inverse) / (1 + e @ inverse @ e)
    return [e @ inverse @ e for e in embeddings]


@pytest.mark.parametrize("ridge", [0.01, 1.0])
@pytest.mark.parametrize("dimensions", [3, 40])
def test_rep_exp_equals_the_definition_of_its_authors(ridge, dimensions):
    embeddings = np.random.default_rng(1).normal(size=(P, N, dimensions)).astype(np.float32)
    bonus = np.array([rep_exp_by_its_authors(rows, ridge) for rows in embeddings])
    np.testing.assert_allclose(rep_exp(REWARDS, embeddings, 0.5, ridge), less_mean(REWARDS + 0.5 * bonus), atol=1e-4)


def test_rep_exp_gives_an_outlier_a_bonus():
    """Seven equal embeddings and one outlier, in one dimension: the bonus is the square over the sum of squares."""
    embeddings = np.zeros((1, N, 1), np.float32)
    embeddings[0, 0] = 8
    centered = less_mean(embeddings[:, :, 0])
    bonus = centered**2 / ((centered**2).sum() + 0.01)
    advantages = rep_exp(BINARY, embeddings, 1.0)
    np.testing.assert_allclose(advantages, less_mean(BINARY + bonus), atol=1e-5)


def test_rep_exp_gives_no_bonus_without_a_correct_generation():
    rewards = np.concatenate([np.zeros((1, N)), BINARY]).astype(np.float32)
    advantages = np.asarray(rep_exp(rewards, EMBEDDINGS[:2], 1.0))
    assert (advantages[0] == 0).all()
    assert np.abs(advantages[1] - less_mean(BINARY)).max() > 0.1


def test_dqo_by_determinants():
    gains = np.array([gains_of(cosines_of(rows)) for rows in EMBEDDINGS])
    np.testing.assert_allclose(dqo(REWARDS, EMBEDDINGS, 0.7), less_mean(REWARDS + 0.7 * gains), atol=1e-5)
    assert (gains[:, [2, 3]] < math.log(2) - 0.2).all()  # repeated responses have a smaller gain


def test_dqo_by_hand():
    """For two equal embeddings and an orthogonal one, det(I + K) is 3 * 2. It is 4 or 3 without one of them."""
    embeddings = np.array([[[1, 0], [5, 0], [0, 2]]], np.float32)  # the lengths have no effect
    rewards = np.array([[1, 0, 0]], np.float32)
    gains = np.array([math.log(6 / 4), math.log(6 / 4), math.log(6 / 3)])
    np.testing.assert_allclose(dqo(rewards, embeddings, 2.0), less_mean([rewards[0] + 2 * gains]), atol=1e-6)


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_set_dpp_by_determinants(scale):
    expected = []
    for rewards, rows in zip(REWARDS.astype(np.float64), EMBEDDINGS, strict=True):
        kernel = scale * np.sqrt(np.outer(rewards, rewards)) * cosines_of(rows)
        expected.append(np.array(gains_of(kernel)) / math.log(1 + scale))
    np.testing.assert_allclose(set_dpp(REWARDS, EMBEDDINGS, scale), less_mean(expected), atol=1e-5)


def test_set_dpp_by_hand():
    """Three correct responses, two of them equal, gain log2(3/2), log2(3/2) and 1. The incorrect response gains 0."""
    embeddings = np.array([[[1, 0], [1, 0], [0, 1], [0, 1]]], np.float32)
    rewards = np.array([[1, 1, 1, 0]], np.float32)
    repeated = math.log2(1.5)
    np.testing.assert_allclose(set_dpp(rewards, embeddings, 1.0), less_mean([[repeated, repeated, 1, 0]]), atol=1e-6)


def test_set_dpp_is_grpo_for_orthogonal_embeddings_or_a_small_scale():
    np.testing.assert_allclose(set_dpp(BINARY, ORTHOGONAL, 5.0), grpo_advantages(BINARY), atol=1e-6)
    np.testing.assert_allclose(set_dpp(REWARDS, EMBEDDINGS, 0.001), grpo_advantages(REWARDS), atol=0.01)


def diversity_by_setpo(embeddings):
    """Returns the mean of -log(1 + mean similarity to all embeddings, including itself)."""
    kernel = np.maximum(cosines_of(embeddings), 0)
    return -np.log(1 + kernel.mean(axis=1)).mean()


def test_set_po_equals_leave_one_out_differences():
    gains = np.zeros((P, N))
    for row, i in itertools.product(range(P), range(N)):
        rest = np.delete(EMBEDDINGS[row], i, axis=0)
        gains[row, i] = diversity_by_setpo(EMBEDDINGS[row]) - diversity_by_setpo(rest)
    assert (gains.argmin(axis=1) != gains.argmax(axis=1)).all()
    np.testing.assert_allclose(set_po(REWARDS, EMBEDDINGS, 3.0), less_mean(REWARDS + 3 * gains), atol=1e-5)


def test_set_po_gives_an_outlier_the_largest_advantage():
    """Seven equal embeddings and one outlier, with equal rewards, so that advantages depend on the gain only."""
    embeddings = np.tile(np.array([1.0, 0.0], np.float32), (1, N, 1))
    embeddings[0, 5] = [0, 1]
    (advantages,) = np.asarray(set_po(np.ones((1, N), np.float32), embeddings, 1.0))
    assert advantages.argmax() == 5 and advantages[5] > 0.1


@pytest.mark.parametrize("advantages", [lambda r, e: dqo(r, e, 0.0), lambda r, e: set_po(r, e, 0.0)])
def test_weight_zero_gives_grpo(advantages):
    np.testing.assert_allclose(advantages(REWARDS, EMBEDDINGS), grpo_advantages(REWARDS), atol=1e-6)
