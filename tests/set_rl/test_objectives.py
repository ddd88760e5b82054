"""Set objectives against hand-computed scores and a plain loop."""

import jax
import numpy as np
import pytest

from poly_epo_jax.set_rl import DEGENERATE_CLUSTER, OBJECTIVES, features_read, mean_reward, pass_at_n, polychromic

RNG = np.random.default_rng(0)
REWARDS = np.array([[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0]], np.float32)
CLUSTERS = np.array([[1, 2, 1, 7], [1, 2, 3, 4], [5, 100, 100, 5]], np.int32)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("objective", "scores"),
    [
        (polychromic, [3 / 4 * 3 / 4, 0.0, 1 / 4 * 1 / 4]),  # the degenerate cluster 100 adds no diversity
        (pass_at_n, [1.0, 0.0, 0.5]),
        (mean_reward, [3 / 4, 0.0, 1 / 4]),
    ],
)
def test_hand_computed(transform, objective, scores):
    features = {"rewards": REWARDS, "clusters": CLUSTERS}
    result = transform(objective)(**{name: features[name] for name in features_read(objective)})
    np.testing.assert_allclose(result, scores, atol=1e-7)


def test_polychromic_counts_clusters_as_python_does():
    rewards = RNG.random((5, 30, 6)).astype(np.float32)
    clusters = RNG.choice([0, 1, 2, 3, 4, DEGENERATE_CLUSTER], (5, 30, 6))
    diversity = [[len(set(ids) - {DEGENERATE_CLUSTER}) / 6 for ids in prompt] for prompt in clusters.tolist()]
    expected = rewards.astype(np.float64).mean(-1) * np.array(diversity)
    np.testing.assert_allclose(polychromic(rewards=rewards, clusters=clusters), expected, atol=1e-6)


def test_only_gibberish_scores_zero():
    clusters = np.full((1, 4), DEGENERATE_CLUSTER)
    assert polychromic(rewards=np.ones((1, 4), np.float32), clusters=clusters).tolist() == [0.0]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_order_within_a_set_is_irrelevant(name):
    rewards = RNG.random((8, 5)).astype(np.float32)
    clusters = RNG.choice([0, 1, 2, DEGENERATE_CLUSTER], (8, 5))
    order = RNG.permutation(5)
    score = OBJECTIVES[name].score
    features = {"rewards": rewards, "clusters": clusters}
    read = {name: features[name] for name in features_read(score)}
    shuffled = {name: feature[:, order] for name, feature in read.items()}
    np.testing.assert_allclose(score(**shuffled), score(**read), atol=1e-6)


def test_every_objective_has_its_own_name():
    assert all(OBJECTIVES[objective.__name__].score is objective for objective in (polychromic, pass_at_n, mean_reward))
