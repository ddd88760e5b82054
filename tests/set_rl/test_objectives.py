"""Tests of set objectives against scores computed by hand and by loops."""

import math

import jax
import numpy as np
import pytest

from poly_epo_jax.set_rl import (
    DEGENERATE_CLUSTER,
    OBJECTIVES,
    determinant,
    enumerate_sets,
    features_read,
    marginal_set_advantages,
    mean_reward,
    pass_at_n,
    polychromic,
    reward_plus_diversity,
)

RNG = np.random.default_rng(0)
REWARDS = np.array([[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0]], np.float32)
CLUSTERS = np.array([[1, 2, 1, 7], [1, 2, 3, 4], [5, 100, 100, 5]], np.int32)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("objective", "scores"),
    [
        (polychromic, [3 / 4 * 3 / 4, 0.0, 1 / 4 * 1 / 4]),  # cluster 100 is degenerate and adds no diversity
        (pass_at_n, [1.0, 0.0, 0.5]),
        (mean_reward, [3 / 4, 0.0, 1 / 4]),
        (reward_plus_diversity, [3 / 4 + 3 / 4, 0.0 + 1, 1 / 4 + 1 / 4]),
    ],
)
def test_scores_by_hand(transform, objective, scores):
    features = {"rewards": REWARDS, "clusters": CLUSTERS}
    result = transform(objective)(**{name: features[name] for name in features_read(objective)})
    np.testing.assert_allclose(result, scores, atol=1e-7)


def test_polychromic_counts_distinct_clusters():
    rewards = RNG.random((5, 30, 6)).astype(np.float32)
    clusters = RNG.choice([0, 1, 2, 3, 4, DEGENERATE_CLUSTER], (5, 30, 6))
    diversity = [[len(set(ids) - {DEGENERATE_CLUSTER}) / 6 for ids in prompt] for prompt in clusters.tolist()]
    expected = rewards.astype(np.float64).mean(-1) * np.array(diversity)
    np.testing.assert_allclose(polychromic(rewards=rewards, clusters=clusters), expected, atol=1e-6)


def test_degenerate_responses_alone_score_zero():
    clusters = np.full((1, 4), DEGENERATE_CLUSTER)
    assert polychromic(rewards=np.ones((1, 4), np.float32), clusters=clusters).tolist() == [0.0]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_scores_do_not_depend_on_the_order_within_a_set(name):
    rewards = RNG.random((8, 5)).astype(np.float32)
    clusters = RNG.choice([0, 1, 2, DEGENERATE_CLUSTER], (8, 5))
    order = RNG.permutation(5)
    score = OBJECTIVES[name].score
    features = {"rewards": rewards, "clusters": clusters, "embeddings": RNG.random((8, 5, 3)).astype(np.float32)}
    read = {name: features[name] for name in features_read(score)}
    shuffled = {name: feature[:, order] for name, feature in read.items()}
    np.testing.assert_allclose(score(**shuffled), score(**read), atol=1e-6)


def test_objectives_are_registered_under_their_function_names():
    assert all(entry.score.__name__ == name for name, entry in OBJECTIVES.items())


def test_determinant_by_hand():
    """Orthogonal embeddings, parallel embeddings, and two equal ones with an orthogonal one (determinant 3 * 2)."""
    embeddings = np.array(
        [[[1, 0, 0], [0, 2, 0], [0, 0, 3]], [[1, 0, 0], [2, 0, 0], [9, 0, 0]], [[1, 0, 0], [1, 0, 0], [0, 1, 0]]],
        np.float32,
    )
    rewards = np.array([[1, 0, 1], [1, 1, 1], [0.5, 0, 1]], np.float32)
    expected = [2 / 3, math.log2(4) / 3, 1 / 2 * math.log2(6) / 3]
    np.testing.assert_allclose(determinant(rewards=rewards, embeddings=embeddings), expected, rtol=1e-5)


def test_determinant_equals_numpy():
    rewards, embeddings = RNG.random((7, 4)).astype(np.float32), RNG.normal(size=(7, 4, 6)).astype(np.float32)
    unit = embeddings.astype(np.float64) / np.linalg.norm(embeddings.astype(np.float64), axis=-1, keepdims=True)
    volume = np.log2(np.linalg.det(np.eye(4) + unit @ unit.swapaxes(-1, -2))) / 4
    expected = rewards.astype(np.float64).mean(axis=-1) * volume
    np.testing.assert_allclose(determinant(rewards=rewards, embeddings=embeddings), expected, rtol=1e-5)


def test_determinant_of_zero_embeddings_is_finite():
    rewards, embeddings = np.ones((2, 4), np.float32), np.zeros((2, 4, 3), np.float32)
    embeddings[1, 0] = [1e3, 0, 0]
    np.testing.assert_allclose(determinant(rewards=rewards, embeddings=embeddings), [0, 1 / 4], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, entry in OBJECTIVES.items() if entry.closed_form])
@pytest.mark.parametrize("set_size", [1, 3, 6])
def test_closed_forms_equal_enumeration(name, set_size):
    rewards = RNG.random((9, 7)).astype(np.float32)
    rewards[::2] = rewards[::2] > 0.5
    features = {"rewards": rewards, "clusters": RNG.choice([0, 1, 2, DEGENERATE_CLUSTER], (9, 7))}
    score, closed_form = OBJECTIVES[name].score, OBJECTIVES[name].closed_form
    assert closed_form
    read = {key: features[key] for key in features_read(score)}
    enumerated = marginal_set_advantages(score, enumerate_sets(7, set_size), **read)
    np.testing.assert_allclose(closed_form(**read, set_size=set_size), enumerated, atol=1e-6)
