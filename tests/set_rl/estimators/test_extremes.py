"""Tests of estimators against float64 references in NumPy, with rewards and embeddings of extreme scales."""

import math

import jax
import numpy as np
import pytest
from test_embedding_based import cosines_of, gains_of, less_mean
from test_reward_based import entropic_by_its_authors

from poly_epo_jax.set_rl import entropic_advantages, rep_exp_advantages, rs_grpo_advantages, set_dpp_advantages

FAST_COMPILE = {"xla_backend_optimization_level": 0}
entropic = jax.jit(entropic_advantages, static_argnames="kl", compiler_options=FAST_COMPILE)
rs_grpo = jax.jit(rs_grpo_advantages, static_argnames="beta", compiler_options=FAST_COMPILE)
rep_exp = jax.jit(rep_exp_advantages, static_argnames=("beta", "ridge"), compiler_options=FAST_COMPILE)
set_dpp = jax.jit(set_dpp_advantages, static_argnames="scale", compiler_options=FAST_COMPILE)


def extreme_rewards(rng, N):
    """Returns rewards that are binary, random, nearly equal, nearly best, of several scales, and negative."""
    near_best = np.where(np.arange(N) < N // 2, 1 - 10.0 ** -rng.integers(4, 7) * rng.random(N), 0)
    rows = [rng.random(N) < p for p in (0.2, 0.5, 0.9)] + [rng.random(N) * 10.0**e for e in (-30, -6, -3, 0, 2, 4)]
    rows += [0.5 + 10.0**e * rng.random(N) for e in (-6, -4, -2)] + [near_best, 1 - near_best, -rng.random(N)]
    rows += [np.sort(1 - np.geomspace(1e-7, 1, N)), np.where(np.arange(N) == 0, 1, 1 - 6e-8), np.full(N, 0.7)]
    return np.array(rows, np.float32)


@pytest.mark.parametrize("num_generations", [4, 8, 16, 64])
@pytest.mark.parametrize("kl", [0.01, math.log(2), 1.0])
def test_entropic_equals_its_authors_code(num_generations, kl):
    """The authors limit beta to the power of two above 1e6. Half of the generations may be nearly best."""
    kl = min(kl, math.log(num_generations) / 2)
    rewards = np.concatenate([extreme_rewards(np.random.default_rng(seed), num_generations) for seed in range(5)])
    expected = np.array([entropic_by_its_authors(row, kl) for row in rewards])
    np.testing.assert_allclose(entropic(rewards, kl), expected, rtol=1e-4, atol=1e-4)
    is_equal = np.ptp(rewards, axis=1) == 0
    assert is_equal.any() and (np.asarray(entropic(rewards, kl))[is_equal] == 0).all()


def test_entropic_resolves_differences_that_require_a_large_beta():
    """A difference of 1e-5 from the best reward matters if the other rewards are not much lower."""
    rewards = np.array([[1, 1 - 1e-5, 1 - 2e-5, 1 - 3e-5, 1 - 1e-5, 1 - 2e-5, 1 - 3e-5, 0]], np.float32)
    expected = entropic_by_its_authors(rewards[0])
    assert expected[0] > 2  # a limit of 2^14 on beta would give less than 0.5
    np.testing.assert_allclose(entropic(rewards, math.log(2)), [expected], rtol=1e-4)


@pytest.mark.parametrize("num_generations", [3, 8, 64, 1000])
@pytest.mark.parametrize("beta", [0.01, 2.0, 100.0])
def test_rs_grpo_equals_float64(num_generations, beta):
    rewards = extreme_rewards(np.random.default_rng(1), num_generations)
    weights = np.exp(beta * (rewards.astype(np.float64) - rewards.max(axis=1, keepdims=True)))
    expected = (weights / weights.mean(axis=1, keepdims=True) - 1) / beta
    scale = np.abs(expected).max(axis=1, keepdims=True)
    found = np.asarray(rs_grpo(rewards, beta))
    assert (np.abs(found - expected) <= 1e-5 * scale + 1e-14).all()
    assert (found[np.ptp(rewards, axis=1) == 0] == 0).all()


def reflected(vectors, axis):
    """Returns the images of vectors under the reflection along a unit vector, which mixes all components."""
    return vectors - 2 * np.outer(vectors @ axis, axis)


def unnormalized_embeddings(rng, N, D):
    """Returns embeddings of several scales, with an offset, some large components, and nearly repeated rows."""
    normal = rng.normal(size=(N, D))
    axis = rng.normal(size=D)
    axis /= np.linalg.norm(axis)
    large = normal * np.where(np.arange(D) < 2, 1000, 1)
    return [
        *(scale * normal for scale in (1e-3, 1, 100, 1e6)),
        1e3 + normal,
        100 * rng.normal(size=D) + 0.01 * normal,
        large,
        reflected(large, axis),
        reflected(normal * np.geomspace(1e3, 1e-2, D), axis),
        normal * 1000.0 ** rng.uniform(-1, 1, (N, 1)),
        100 * normal[np.arange(N) // 2],
        100 * normal[np.arange(N) // 2] + 0.05 * rng.normal(size=(N, D)),
    ]


@pytest.mark.parametrize(("N", "D"), [(8, 3), (8, 32), (64, 32), (8, 2560)])
@pytest.mark.parametrize("ridge", [0.01, 1.0])
def test_rep_exp_equals_float64_for_unnormalized_embeddings(N, D, ridge):
    embeddings = np.array(unnormalized_embeddings(np.random.default_rng(D), N, D), np.float32)
    rewards = np.random.default_rng(1).random(embeddings.shape[:2]).astype(np.float32)
    centered = embeddings.astype(np.float64) - embeddings.astype(np.float64).mean(axis=1, keepdims=True)
    left, values, _ = np.linalg.svd(centered, full_matrices=False)
    bonus = (left**2 * (values**2 / (values**2 + ridge))[:, None]).sum(axis=-1)
    np.testing.assert_allclose(rep_exp(rewards, embeddings, 1.0, ridge), less_mean(rewards + bonus), atol=1e-4)


@pytest.mark.parametrize("scale", [0.001, 1.0, 100.0])
def test_set_dpp_equals_float64(scale):
    rng = np.random.default_rng(3)
    embeddings = np.array(unnormalized_embeddings(rng, 16, 4), np.float32)
    for factor in (1, 1e-3, 1e-30):
        rewards = (factor * rng.random(embeddings.shape[:2])).astype(np.float32)
        expected = []
        for row, vectors in zip(rewards.astype(np.float64), embeddings, strict=True):
            gains = gains_of(scale * np.sqrt(np.outer(row, row)) * cosines_of(vectors))
            expected.append(np.array(gains) / math.log1p(scale))
        np.testing.assert_allclose(set_dpp(rewards, embeddings, scale), less_mean(expected), atol=1e-4)


@pytest.mark.parametrize("rewards", [[0, 0, 0], [1, 0, 0], [0.5, 0, 1]])
def test_the_gradient_of_set_dpp_is_finite_and_exact(rewards):
    """The gain of i is a smooth function of all rewards, because determinants are polynomials in them."""
    embeddings = np.array([[[3, 0], [1, 1], [0, 2]]], np.float32)
    cosines, scale, weights = cosines_of(embeddings[0]), 2.0, np.array([[0.7, -0.2, 0.4]])

    def by_determinants(rewards):
        kernel = scale * np.diag(rewards) @ cosines
        return (weights * less_mean(gains_of(kernel)) / math.log1p(scale)).sum()

    rewards = np.array(rewards, np.float64)
    steps = 1e-6 * np.eye(3)
    expected = [(by_determinants(rewards + step) - by_determinants(rewards - step)) / 2e-6 for step in steps]
    found = jax.grad(lambda rewards: (weights * set_dpp_advantages(rewards, embeddings, scale)).sum())(
        rewards[None].astype(np.float32)
    )
    np.testing.assert_allclose(found, [expected], atol=1e-4)
