"""Estimators by embeddings, by hand, by determinants of submatrices, and against what the authors' code computes."""

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
EMBEDDINGS[:, 3] = EMBEDDINGS[:, 2]  # a repetition
ORTHOGONAL = np.eye(N, dtype=np.float32)[None]
BINARY = np.array([[1, 0, 1, 0, 0, 1, 0, 0]], np.float32)


def less_mean(values):
    values = np.array(values, np.float64)
    return values - values.mean(axis=-1, keepdims=True)


def cosines_of(embeddings):
    unit = embeddings.astype(np.float64) / np.linalg.norm(embeddings.astype(np.float64), axis=-1, keepdims=True)
    return unit @ unit.T


def gains_of(kernel):
    """By two determinants for each generation."""
    others = [np.delete(np.arange(len(kernel)), i) for i in range(len(kernel))]
    whole = np.linalg.slogdet(np.eye(len(kernel)) + kernel)[1]
    return [whole - np.linalg.slogdet((np.eye(len(kernel)) + kernel)[np.ix_(rest, rest)])[1] for rest in others]


def rep_exp_by_its_authors(embeddings, ridge):
    """Of one prompt: the inverse covariance of centred embeddings, by an update of rank one for each of them."""
    embeddings = embeddings.astype(np.float64)
    embeddings = embeddings - embeddings.mean(axis=0)
    inverse = np.eye(embeddings.shape[1]) / ridge
    for e in embeddings:
        inverse = inverse - np.outer(inverse @ e, e @ inverse) / (1 + e @ inverse @ e)
    return [e @ inverse @ e for e in embeddings]


@pytest.mark.parametrize("ridge", [0.01, 1.0])
@pytest.mark.parametrize("dimensions", [3, 40])
def test_rep_exp_is_what_its_authors_compute(ridge, dimensions):
    embeddings = np.random.default_rng(1).normal(size=(P, N, dimensions)).astype(np.float32)
    bonus = np.array([rep_exp_by_its_authors(rows, ridge) for rows in embeddings])
    np.testing.assert_allclose(rep_exp(REWARDS, embeddings, 0.5, ridge), less_mean(REWARDS + 0.5 * bonus), atol=1e-4)


def test_rep_exp_pays_the_outlier():
    """Seven alike and one apart, in one dimension: leverages of 1/8 + its square over the sum of squares, less 1/8."""
    embeddings = np.zeros((1, N, 1), np.float32)
    embeddings[0, 0] = 8
    centred = less_mean(embeddings[:, :, 0])
    bonus = centred**2 / ((centred**2).sum() + 0.01)
    advantages = rep_exp(BINARY, embeddings, 1.0)
    np.testing.assert_allclose(advantages, less_mean(BINARY + bonus), atol=1e-5)


def test_rep_exp_pays_nothing_where_nothing_is_right():
    rewards = np.concatenate([np.zeros((1, N)), BINARY]).astype(np.float32)
    advantages = np.asarray(rep_exp(rewards, EMBEDDINGS[:2], 1.0))
    assert (advantages[0] == 0).all()
    assert np.abs(advantages[1] - less_mean(BINARY)).max() > 0.1


def test_dqo_by_determinants():
    gains = np.array([gains_of(cosines_of(rows)) for rows in EMBEDDINGS])
    np.testing.assert_allclose(dqo(REWARDS, EMBEDDINGS, 0.7), less_mean(REWARDS + 0.7 * gains), atol=1e-5)
    assert (gains[:, [2, 3]] < math.log(2) - 0.2).all()  # who repeats gains less


def test_dqo_by_hand():
    """Two equal embeddings and an orthogonal one: det(I + K) is 3 * 2, without an equal one 4, without the other 3."""
    embeddings = np.array([[[1, 0], [5, 0], [0, 2]]], np.float32)  # lengths do not matter
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
    """Three correct, two of them alike: the third gains 1, each of the two log(3/2) / log 2, the incorrect one 0."""
    embeddings = np.array([[[1, 0], [1, 0], [0, 1], [0, 1]]], np.float32)
    rewards = np.array([[1, 1, 1, 0]], np.float32)
    repeated = math.log2(1.5)
    np.testing.assert_allclose(set_dpp(rewards, embeddings, 1.0), less_mean([[repeated, repeated, 1, 0]]), atol=1e-6)


def test_set_dpp_is_grpo_where_nothing_repeats_or_scale_is_small():
    np.testing.assert_allclose(set_dpp(BINARY, ORTHOGONAL, 5.0), grpo_advantages(BINARY), atol=1e-6)
    np.testing.assert_allclose(set_dpp(REWARDS, EMBEDDINGS, 0.001), grpo_advantages(REWARDS), atol=0.01)


def diversity_by_setpo(embeddings):
    """Mean of -log(1 + mean similarity to all, itself included)."""
    kernel = np.maximum(cosines_of(embeddings), 0)
    return -np.log(1 + kernel.mean(axis=1)).mean()


def test_set_po_by_leaving_each_out():
    gains = np.zeros((P, N))
    for row, i in itertools.product(range(P), range(N)):
        rest = np.delete(EMBEDDINGS[row], i, axis=0)
        gains[row, i] = diversity_by_setpo(EMBEDDINGS[row]) - diversity_by_setpo(rest)
    assert (gains.argmin(axis=1) != gains.argmax(axis=1)).all()
    np.testing.assert_allclose(set_po(REWARDS, EMBEDDINGS, 3.0), less_mean(REWARDS + 3 * gains), atol=1e-5)


def test_set_po_pays_the_rare():
    """Seven alike and one apart; the same rewards, so that only the gain counts."""
    embeddings = np.tile(np.array([1.0, 0.0], np.float32), (1, N, 1))
    embeddings[0, 5] = [0, 1]
    (advantages,) = np.asarray(set_po(np.ones((1, N), np.float32), embeddings, 1.0))
    assert advantages.argmax() == 5 and advantages[5] > 0.1


@pytest.mark.parametrize("advantages", [lambda r, e: dqo(r, e, 0.0), lambda r, e: set_po(r, e, 0.0)])
def test_without_weight_it_is_grpo(advantages):
    np.testing.assert_allclose(advantages(REWARDS, EMBEDDINGS), grpo_advantages(REWARDS), atol=1e-6)
