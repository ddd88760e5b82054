"""Tests of DARLING, uniqueness and the shaped product against hand-computed values and the authors' definitions."""

import jax
import numpy as np
import pytest

from poly_epo_jax.set_rl import (
    DEGENERATE_CLUSTER,
    darling_advantages,
    grpo_advantages,
    grpo_div_advantages,
    shaped_product_advantages,
    uniqueness_advantages,
)

FAST_COMPILE = {"xla_backend_optimization_level": 0}
darling = jax.jit(darling_advantages, compiler_options=FAST_COMPILE)
uniqueness = jax.jit(uniqueness_advantages, static_argnames="alpha", compiler_options=FAST_COMPILE)
shaped_product = jax.jit(shaped_product_advantages, compiler_options=FAST_COMPILE)

REWARDS = np.array([[1, 1, 0, 0, 1]], np.float32)
CLUSTERS = np.array([[1, 1, 1, 2, 3]])
G = DEGENERATE_CLUSTER


def less_mean(values):
    return [np.array(values) - np.mean(values)]


def test_darling_by_hand():
    np.testing.assert_allclose(darling(REWARDS, CLUSTERS), less_mean([2 / 4, 2 / 4, 0, 0, 1]), atol=1e-6)
    one_cluster = np.zeros((1, 5), int)
    np.testing.assert_allclose(darling(REWARDS, one_cluster), 0.1 * np.asarray(grpo_advantages(REWARDS)), atol=1e-7)


def test_darling_equals_the_definition_of_its_authors():
    """The reward times the fraction of other generations in other clusters, at least 0.1, minus the group mean."""
    rng = np.random.default_rng(0)
    rewards, clusters = rng.random((20, 8)).astype(np.float32), rng.integers(0, 5, (20, 8))
    expected = []
    for row, ids in zip(rewards.astype(np.float64), clusters.tolist(), strict=True):
        distinct = [max((8 - ids.count(own)) / 7, 0.1) for own in ids]
        expected += less_mean(row * distinct)
    np.testing.assert_allclose(darling(rewards, clusters), expected, atol=1e-6)


def test_uniqueness_by_hand():
    expected = [[0.4 / 3, 0.4 / 3, -0.6 / 3, -0.6, 0.4]]
    np.testing.assert_allclose(uniqueness(REWARDS, CLUSTERS, 1.0), expected, rtol=1e-5)
    expected = [[0.4 / 3**0.5, 0.4 / 3**0.5, -0.6 / 3**0.5, -0.6, 0.4]]
    np.testing.assert_allclose(uniqueness(REWARDS, CLUSTERS, 0.5), expected, rtol=1e-5)
    np.testing.assert_allclose(uniqueness(REWARDS, CLUSTERS, 0.0), grpo_advantages(REWARDS), rtol=1e-6)


def test_uniqueness_gives_degenerate_responses_the_lower_advantage():
    """The weight is that of a cluster of five if the response is correct, and that of a cluster of one otherwise."""
    clusters = np.array([[G, 1, G, 2, 2]])
    np.testing.assert_allclose(uniqueness(REWARDS, clusters, 1.0), [[0.4 / 5, 0.4, -0.6, -0.3, 0.2]], rtol=1e-5)


def test_shaped_product_by_hand():
    common, rare = (5 / 3 - 1) / 4, 1
    np.testing.assert_allclose(
        shaped_product(REWARDS, CLUSTERS), less_mean([common, common, 0, 0, rare]), rtol=1e-5, atol=1e-7
    )


def test_the_product_gives_no_bonus_to_an_incorrect_new_strategy():
    """The product is 0 for incorrect generations, as stated in the paper. The sum gives a positive advantage."""
    rewards, clusters = np.array([[1, 1, 0, 0]], np.float32), np.array([[1, 1, 1, 2]])
    new, repeated = 3, 2
    product = np.asarray(shaped_product(rewards, clusters))[0]
    assert product[new] == product[repeated] < 0
    total = np.asarray(grpo_div_advantages(rewards, clusters, 1.0))[0]
    assert total[new] > 0 > total[repeated]


CLUSTER_ESTIMATORS = pytest.mark.parametrize(
    "advantages",
    [
        darling,
        shaped_product,
        lambda r, c: uniqueness(r, c, 1.0),
        lambda r, c: grpo_div_advantages(r, c, 0.5),
    ],
    ids=["darling", "shaped_product", "uniqueness", "grpo_div"],
)


@CLUSTER_ESTIMATORS
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_degenerate_responses_earn_no_bonus(advantages, reward):
    """A degenerate response gets at most the advantage of the largest cluster, and less than that of a new cluster."""
    rewards = np.array([[1, 1, 0, 0, reward]], np.float32)
    degenerate, common, new = (
        np.asarray(advantages(rewards, np.array([[1, 1, 1, 1, last]])))[0, 4] for last in (G, 1, 2)
    )
    assert degenerate <= common + 1e-7
    assert degenerate < new or reward == 0


@CLUSTER_ESTIMATORS
def test_degenerate_responses_earn_no_bonus_for_rarity(advantages):
    rewards = np.ones((2, 6), np.float32)
    rewards[:, 0] = 0
    clusters = np.array([[1, 2, 3, 4, 5, G], [1, G, G, G, G, G]])
    alone, together = np.asarray(advantages(rewards, clusters)), None
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    assert alone[0, 5] < alone[0, 1:5].min()  # the other responses have their own clusters
    together = alone[1, 1:]
    assert np.ptp(together) == 0 and (together <= centered[1, 1:] + 1e-6).all()
