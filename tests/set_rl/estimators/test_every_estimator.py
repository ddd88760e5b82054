"""Tests of all estimators: finite results in edge cases, symmetry in the generations, and errors for NaN."""

import inspect
import math

import jax
import jaxtyping
import numpy as np
import pytest

from poly_epo_jax import set_rl
from poly_epo_jax.set_rl import DEGENERATE_CLUSTER

FAST_COMPILE = {"xla_backend_optimization_level": 0}
N, D = 8, 3
NUMBERS = {
    "darling": {},
    "dqo": {"weight": 1.0},
    "entropic": {"kl": math.log(2)},
    "grpo": {},
    "grpo_div": {"diversity_coef": 0.5},
    "max_rl": {},
    "pass_at_n": {"set_size": 4},
    "passk": {"k": 4},
    "pkpo": {"k": 4},
    "polychromic": {"set_size": 4},
    "rep_exp": {"beta": 0.5},
    "reward_plus_diversity": {"set_size": 4},
    "rs_grpo": {"beta": 2.0},
    "set_dpp": {"scale": 1.0},
    "set_po": {"weight": 1.0},
    "shaped_product": {},
    "ucpo": {"tau": 0.3},
    "uniqueness": {"alpha": 1.0},
    "unlikeliness": {"beta": 0.25},
}
SET_BASED = ("pass_at_n", "passk", "pkpo", "polychromic", "reward_plus_diversity")
COMPILED = {
    name: jax.jit(getattr(set_rl, f"{name}_advantages"), static_argnames=tuple(numbers), compiler_options=FAST_COMPILE)
    for name, numbers in NUMBERS.items()
}
EVERY = pytest.mark.parametrize("name", NUMBERS)


def advantages_of(name, features, **changes):
    """Computes the advantages from the features that the parameters of the estimator name."""
    read = {key: value for key, value in features.items() if key in inspect.signature(COMPILED[name]).parameters}
    return np.asarray(COMPILED[name](**read, **NUMBERS[name] | changes))


def random_features(num_prompts, num_generations, seed=0):
    rng = np.random.default_rng(seed)
    rewards = rng.random((num_prompts, num_generations)).astype(np.float32)
    rewards[::2] = rewards[::2] > 0.5
    clusters = rng.choice([1, 2, 3, DEGENERATE_CLUSTER], (num_prompts, num_generations))
    return {
        "rewards": rewards,
        "clusters": clusters.astype(np.int32),
        "mean_logprob": -rng.random((num_prompts, num_generations)).astype(np.float32),
        "embeddings": rng.normal(size=(num_prompts, num_generations, D)).astype(np.float32),
    }


def edge_cases(num_generations):
    """Returns features of prompts that combine all kinds of rewards with all kinds of other features."""
    shape, rng = (num_generations,), np.random.default_rng(1)
    one = np.arange(num_generations) == 0
    all_rewards = (
        np.zeros(shape),
        np.ones(shape),
        np.full(shape, 0.3),
        one,
        ~one,
        0.5 + 1e-7 * one,
        1e-30 * rng.random(shape),
        rng.random(shape),
        -rng.random(shape),
        1e4 * rng.random(shape),
    )
    flat, spread = np.zeros((num_generations, D)), rng.normal(size=(num_generations, D))
    kinds = (
        (np.ones(shape), np.full(shape, -1.0), np.ones((num_generations, D))),
        (np.arange(num_generations), -rng.random(shape), spread),
        (np.full(shape, DEGENERATE_CLUSTER), np.full(shape, -1e4), flat),
        (np.where(one, DEGENERATE_CLUSTER, 1), np.where(one, -1e4, 0.0), np.where(one[:, None], 1e3, 1e-3) * spread),
    )
    rows = [(rewards, *kind) for rewards in all_rewards for kind in kinds]
    rewards, clusters, mean_logprob, embeddings = map(np.stack, zip(*rows, strict=True))
    return {
        "rewards": rewards.astype(np.float32),
        "clusters": clusters.astype(np.int32),
        "mean_logprob": mean_logprob.astype(np.float32),
        "embeddings": embeddings.astype(np.float32),
    }


@EVERY
def test_advantages_are_finite_in_edge_cases(name):
    features = edge_cases(N)
    advantages = advantages_of(name, features)
    assert advantages.shape == features["rewards"].shape
    assert np.isfinite(advantages).all()


@EVERY
def test_identical_generations_have_zero_advantages(name):
    """Rewards, clusters, likelihoods and embeddings are equal, for several rewards."""
    rewards = np.repeat(np.array([[0.0], [0.3], [1.0]], np.float32), N, axis=1)
    for cluster in (1, DEGENERATE_CLUSTER):
        alike = {
            "rewards": rewards,
            "clusters": np.full((3, N), cluster, np.int32),
            "mean_logprob": np.full((3, N), -0.7, np.float32),
            "embeddings": np.full((3, N, D), 0.2, np.float32),
        }
        np.testing.assert_array_equal(advantages_of(name, alike), np.zeros((3, N)))


@pytest.mark.parametrize("name", sorted(set(NUMBERS) - {"dqo", "grpo_div", "reward_plus_diversity", "set_po"}))
def test_zero_rewards_give_zero_advantages(name):
    """Estimators that add a bonus to all rewards are excluded."""
    features = random_features(12, N) | {"rewards": np.zeros((12, N), np.float32)}
    np.testing.assert_array_equal(advantages_of(name, features), np.zeros((12, N)))


@pytest.mark.slow
@pytest.mark.parametrize("num_generations", [3, 5, 7, 42, 64])
@EVERY
def test_equal_generations_have_zero_advantages_in_groups_of_any_size(name, num_generations):
    """A product that XLA fuses with a subtraction is not rounded, and rounding errors of a matrix inverse differ."""
    rewards = np.repeat(np.array([[0.1], [1 / 3], [123.4]], np.float32), num_generations, axis=1)
    one = np.random.default_rng(0).normal(size=(3, 1, 5)).astype(np.float32)
    alike = {
        "rewards": rewards,
        "clusters": np.ones_like(rewards, np.int32),
        "mean_logprob": np.full_like(rewards, -0.7),
        "embeddings": np.repeat(one, num_generations, axis=1),
    }
    changes = {key: 2 for key in NUMBERS[name] if key in ("k", "set_size")}
    np.testing.assert_array_equal(advantages_of(name, alike, **changes), np.zeros_like(rewards))


@pytest.mark.parametrize("name", [name for name in NUMBERS if name not in SET_BASED])
def test_a_single_generation_has_zero_advantage(name):
    advantages = advantages_of(name, edge_cases(1))
    np.testing.assert_array_equal(advantages, np.zeros_like(advantages))


@EVERY
def test_permuting_generations_permutes_advantages(name):
    features = random_features(12, N)
    order = np.random.default_rng(2).permutation(N)
    permuted = advantages_of(name, {key: value[:, order] for key, value in features.items()})
    advantages = advantages_of(name, features)
    assert np.abs(advantages).max() > 0.01
    np.testing.assert_allclose(permuted, advantages[:, order], rtol=1e-4, atol=1e-5)


@EVERY
def test_advantages_depend_on_their_own_prompt_only(name):
    features = random_features(12, N)
    changed = {key: value.copy() for key, value in features.items()}
    for key, value in random_features(12, N, seed=3).items():
        changed[key][0] = value[0]
    np.testing.assert_allclose(advantages_of(name, changed)[1:], advantages_of(name, features)[1:], atol=1e-6)


@EVERY
def test_nan_and_mismatched_shapes_are_rejected(name, monkeypatch):
    function = getattr(set_rl, f"{name}_advantages")
    features = random_features(2, N)
    read = [key for key in inspect.signature(function).parameters if key in features]
    for key in set(read) & {"rewards", "mean_logprob", "embeddings"}:
        broken = {name: features[name] for name in read} | {key: np.full_like(features[key], np.nan)}
        with pytest.raises(ValueError, match=f"{key} contains NaN"):
            function(**broken, **NUMBERS[name])
    if len(read) > 1:
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        with pytest.raises(ValueError, match=r"\[P, N\]"):
            function(**{name: features[name] for name in read} | {"rewards": np.zeros((2, N + 1))}, **NUMBERS[name])


def test_all_estimators_are_covered():
    exported = {name.removesuffix("_advantages") for name in dir(set_rl) if name.endswith("_advantages")}
    assert exported - {"marginal_set"} == set(NUMBERS)
