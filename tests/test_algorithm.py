"""What a configuration asks for is what set_rl computes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poly_epo_jax import set_rl
from poly_epo_jax.algorithm import make_advantages, make_loss
from poly_epo_jax.config import AlgoSection

P, N, SET_SIZE, NUM_SETS = 5, 7, 3, 20
KEY = jax.random.key(3)


def algo(**changes: Any) -> AlgoSection:
    return AlgoSection(**{"set_size": SET_SIZE} | changes)


@pytest.fixture
def graded() -> tuple[np.ndarray, np.ndarray]:
    """Rewards and clusters, some of them degenerate."""
    rng = np.random.default_rng(0)
    clusters = rng.integers(0, 4, (P, N), np.int32)
    clusters[rng.random((P, N)) < 0.15] = set_rl.DEGENERATE_CLUSTER
    return rng.random((P, N)).astype(np.float32), clusters


def sampled(rewards: np.ndarray, clusters: np.ndarray) -> jax.Array:
    sets = jnp.stack([set_rl.sample_sets(key, N, SET_SIZE, NUM_SETS) for key in jax.random.split(KEY, P)])
    return set_rl.marginal_set_advantages(set_rl.polychromic, sets, rewards=rewards, clusters=clusters)


def over_all_sets(objective: Any, rewards: np.ndarray, clusters: np.ndarray) -> jax.Array:
    sets = set_rl.enumerate_sets(N, SET_SIZE)
    return set_rl.marginal_set_advantages(objective, sets, rewards=rewards, clusters=clusters)


@pytest.mark.parametrize(
    ("changes", "direct"),
    [
        ({}, lambda r, c: over_all_sets(set_rl.polychromic, r, c)),
        ({"num_sets": NUM_SETS}, sampled),
        ({"objective": "pass_at_n"}, lambda r, c: over_all_sets(set_rl.pass_at_n, r, c)),
        ({"objective": "mean_reward"}, lambda r, c: over_all_sets(set_rl.mean_reward, r, c)),
        ({"advantages": "grpo"}, lambda r, c: set_rl.grpo_advantages(r)),
        ({"advantages": "grpo_div", "div_coef": 0.7}, lambda r, c: set_rl.grpo_div_advantages(r, c, 0.7)),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "polychromic" if isinstance(changes, dict) else "",
)
def test_advantages_are_those_of_set_rl(changes, direct, graded):
    advantages = make_advantages(algo(**changes))(KEY, *graded)
    np.testing.assert_allclose(advantages, direct(*graded), rtol=1e-5, atol=1e-6)
    assert np.abs(advantages).max() > 0.01


def test_sampled_sets_follow_the_key(graded):
    advantages = make_advantages(algo(num_sets=NUM_SETS))
    np.testing.assert_array_equal(advantages(KEY, *graded), advantages(KEY, *graded))
    assert np.abs(advantages(KEY, *graded) - advantages(jax.random.key(4), *graded)).max() > 0.001


def test_every_prompt_draws_its_own_sets(graded):
    rewards, clusters = (np.broadcast_to(values[:1], (P, N)) for values in graded)
    advantages = np.asarray(make_advantages(algo(num_sets=NUM_SETS))(KEY, rewards, clusters))
    assert len(np.unique(advantages, axis=0)) == P


def test_sampling_all_sets_is_the_closed_form(graded):
    all_of_them = make_advantages(algo(num_sets=35))(KEY, *graded)
    np.testing.assert_allclose(all_of_them, make_advantages(algo())(KEY, *graded), rtol=1e-5, atol=1e-6)


def test_an_objective_of_ones_own(graded, monkeypatch):
    """The range of a set's rewards, registered by name and nothing else."""

    def spread(rewards, **unused):
        return rewards.max(axis=-1) - rewards.min(axis=-1)

    monkeypatch.setitem(set_rl.OBJECTIVES, "spread", spread)
    rewards, clusters = graded
    advantages = make_advantages(algo(objective="spread"))(KEY, rewards, clusters)

    sets = set_rl.enumerate_sets(N, SET_SIZE)
    scores = np.ptp(rewards.astype(np.float64)[:, sets], axis=-1)
    over_sets_of = [scores[:, (sets == i).any(axis=1)].mean(axis=1) for i in range(N)]
    expected = np.stack(over_sets_of, axis=1) - scores.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(advantages, expected, atol=1e-6)


@pytest.mark.parametrize("name", set_rl.LOSSES)
def test_the_loss_gets_its_clip_range(name: str):
    """Two ratios far outside of the range, one with each sign of the advantage."""
    logprobs, old_logprobs = jnp.log(jnp.array([[0.9, 0.1]])), jnp.log(jnp.array([[0.3, 0.3]]))
    arrays = logprobs, old_logprobs, jnp.array([[1.0, -1.0]]), jnp.array([[0.5, 0.5]])
    bounds = {} if name == "policy_gradient" else {"clip_low": 0.1, "clip_high": 0.4}
    loss, _ = make_loss(algo(loss=name, clip_low=0.1, clip_high=0.4))(*arrays)
    np.testing.assert_allclose(loss, set_rl.LOSSES[name](*arrays, **bounds)[0], rtol=1e-6)
    if bounds:
        other, _ = make_loss(algo(loss=name, clip_low=0.2, clip_high=0.2))(*arrays)
        assert not np.isclose(loss, other)
