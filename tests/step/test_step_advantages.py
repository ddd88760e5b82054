"""Estimators and losses compute the values of set_rl with the configured options."""

import dataclasses
import inspect
import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poly_epo_jax import set_rl
from poly_epo_jax.config.keys import AlgoSection, ConfigError
from poly_epo_jax.rollouts.groups import generation_seeds
from poly_epo_jax.step.advantages import (
    ADVANTAGES,
    Estimator,
    check_estimator,
    check_loss,
    make_advantages,
    make_estimator,
    make_loss,
)
from poly_epo_jax.step.objective import checked_loss
from poly_epo_jax.types import Problem

P, N, SET_SIZE, NUM_SETS = 5, 7, 3, 20
SEED, STEP = 5, 3
PROBLEMS = [Problem(str(i), "", "") for i in range(P)]


def algo(**changes: Any) -> AlgoSection:
    settings: dict[str, Any] = {"set_size": SET_SIZE} | changes
    return AlgoSection(**settings)


@pytest.fixture
def graded() -> tuple[np.ndarray, np.ndarray]:
    """Rewards and clusters, some of them degenerate."""
    rng = np.random.default_rng(0)
    clusters = rng.integers(0, 4, (P, N), np.int32)
    clusters[rng.random((P, N)) < 0.15] = set_rl.DEGENERATE_CLUSTER
    return rng.random((P, N)).astype(np.float32), clusters


def advantages_of(section: AlgoSection, rewards: np.ndarray, clusters: np.ndarray, step: int = STEP) -> np.ndarray:
    features = {"rewards": rewards, "clusters": clusters, "lengths": np.ones((P, N), np.int32)}
    return make_advantages(section, SEED)(step, PROBLEMS, features)


def sampled(rewards: np.ndarray, clusters: np.ndarray) -> jax.Array:
    keys = [jax.random.fold_in(jax.random.key(SEED), generation_seeds(STEP, problem, 1)[0]) for problem in PROBLEMS]
    sets = jnp.stack([set_rl.sample_sets(jax.random.split(key, 1)[0], N, SET_SIZE, NUM_SETS) for key in keys])
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
        ({"objective": "reward_plus_diversity"}, lambda r, c: over_all_sets(set_rl.reward_plus_diversity, r, c)),
        ({"advantages": "grpo"}, lambda r, c: set_rl.grpo_advantages(r)),
        ({"advantages": "grpo_div", "diversity_coef": 0.7}, lambda r, c: set_rl.grpo_div_advantages(r, c, 0.7)),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "polychromic" if isinstance(changes, dict) else "",
)
def test_advantages_equal_those_of_set_rl(changes, direct, graded):
    advantages = advantages_of(algo(**changes), *graded)
    np.testing.assert_allclose(advantages, jax.jit(direct)(*graded), rtol=1e-5, atol=1e-6)
    assert np.abs(advantages).max() > 0.01


def test_sampled_sets_depend_on_the_key(graded):
    section = algo(num_sets=NUM_SETS)
    advantages = advantages_of(section, *graded)
    np.testing.assert_array_equal(advantages, advantages_of(section, *graded))
    assert np.abs(advantages - advantages_of(section, *graded, step=STEP + 1)).max() > 0.001


def test_sets_are_sampled_independently_per_prompt(graded):
    rewards, clusters = (np.broadcast_to(values[:1], (P, N)) for values in graded)
    advantages = advantages_of(algo(num_sets=NUM_SETS), rewards, clusters)
    assert len(np.unique(advantages, axis=0)) == P


@pytest.mark.parametrize(
    "changes", [{}, {"num_sets": NUM_SETS}, {"advantages": "grpo"}, {"advantages": "set_dpp"}], ids=str
)
def test_advantages_of_a_prompt_do_not_depend_on_the_batch(graded, changes):
    """Sampled sets are keyed by the problem and its occurrence. The comparison is exact."""
    function, (rewards, clusters) = make_advantages(algo(**changes), SEED), graded
    embeddings = np.random.default_rng(0).normal(size=(P, N, 3)).astype(np.float32)
    features = {"rewards": rewards, "clusters": clusters, "embeddings": embeddings}
    expected = function(STEP, PROBLEMS, features)
    for chosen in ([3], [4, 0], [2, 1, 0, 4, 3]):
        part = {name: feature[chosen] for name, feature in features.items()}
        found = function(STEP, [PROBLEMS[i] for i in chosen], part)
        np.testing.assert_array_equal(found, expected[chosen])
    again = function(STEP, [dataclasses.replace(problem, occurrence=1) for problem in PROBLEMS], features)
    assert np.array_equal(again, expected) == ("num_sets" not in changes)


def test_sampling_all_sets_equals_the_closed_form(graded):
    all_sets = advantages_of(algo(num_sets=35), *graded)
    np.testing.assert_allclose(all_sets, advantages_of(algo(), *graded), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [slice(0, 1), slice(0, N - 1), 0, None], ids=str)
def test_advantages_of_another_shape_are_rejected(graded, monkeypatch, columns):
    def factory(algo: AlgoSection) -> Estimator:
        return Estimator(lambda key, features: jnp.asarray(features["rewards"])[:, columns], ("rewards",), "Partial")

    monkeypatch.setitem(ADVANTAGES, "partial", factory)
    with pytest.raises(ValueError, match=rf"^Partial returned an array of shape \(1,.* of shape \(1, {N}\); "):
        advantages_of(algo(advantages="partial"), *graded)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_advantages_are_rejected(graded, monkeypatch, value):
    def score(rewards):
        return jnp.full(len(rewards), value)

    monkeypatch.setitem(set_rl.OBJECTIVES, "endless", set_rl.Objective(score, "Endless"))
    with pytest.raises(ValueError, match=rf"^Endless .*non-finite advantage for problem '0' of step {STEP};"):
        advantages_of(algo(objective="endless"), *graded)


def test_a_custom_objective(graded, monkeypatch):
    """The range of a set's rewards, which only has to be registered."""

    def spread(rewards):
        return rewards.max(axis=-1) - rewards.min(axis=-1)

    monkeypatch.setitem(set_rl.OBJECTIVES, "spread", set_rl.Objective(spread, "Spread"))
    rewards, clusters = graded
    advantages = advantages_of(algo(objective="spread"), rewards, clusters)
    assert make_estimator(algo(objective="spread"))[1:3] == (("rewards",), "Spread")

    sets = set_rl.enumerate_sets(N, SET_SIZE)
    scores = np.ptp(rewards.astype(np.float64)[:, sets], axis=-1)
    over_sets_of = [scores[:, (sets == i).any(axis=1)].mean(axis=1) for i in range(N)]
    expected = np.stack(over_sets_of, axis=1) - scores.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(advantages, expected, atol=1e-6)


@pytest.mark.parametrize("name", set_rl.LOSSES)
def test_the_loss_receives_its_clip_range(name: str):
    """Two ratios are far outside of the clip range, one for each sign of the advantage."""
    logprobs, old_logprobs = jnp.log(jnp.array([[0.9, 0.1]])), jnp.log(jnp.array([[0.3, 0.3]]))
    arrays = logprobs, old_logprobs, jnp.array([[1.0, -1.0]]), jnp.array([[0.5, 0.5]]), jnp.array([[1, 2]])
    tokens = set_rl.Tokens(*arrays)
    reads = "clip_low" in inspect.signature(set_rl.LOSSES[name]).parameters
    bounds = {"clip_low": 0.1, "clip_high": 0.4} if reads else {}
    loss, _ = make_loss(algo(loss=name, clip_low=0.1, clip_high=0.4))(tokens)
    np.testing.assert_allclose(loss, set_rl.LOSSES[name](tokens, **bounds)[0], rtol=1e-6)
    if bounds:
        other, _ = make_loss(algo(loss=name, clip_low=0.2, clip_high=0.2))(tokens)
        assert not np.isclose(loss, other)


def test_the_covariance_losses_receive_their_options():
    rng = np.random.default_rng(0)
    logprobs, old_logprobs, advantages = jnp.asarray(rng.normal(size=(3, 2, 40)), jnp.float32)
    tokens = set_rl.Tokens(logprobs, old_logprobs, advantages, jnp.ones((2, 40)), jnp.ones((2, 40), int))
    keys = {"cov_fraction": 0.2, "cov_kl_coef": 3.0, "cov_low": 0.2, "cov_high": 0.9}
    of_kl = {name: keys[name] for name in ("cov_fraction", "cov_kl_coef")}
    of_clip = {name: keys[name] for name in ("cov_fraction", "cov_low", "cov_high")}
    for name, numbers in (("kl_cov", of_kl), ("clip_cov", of_clip)):
        loss, metrics = jax.jit(make_loss(algo(loss=name, loss_options=numbers)))(tokens)
        direct, counted = jax.jit(partial(set_rl.LOSSES[name], **numbers))(tokens)
        assert loss == direct and metrics == counted
        if name == "kl_cov":
            default, _ = jax.jit(make_loss(algo(loss=name)))(tokens)
            assert not np.isclose(default, loss)


def test_a_custom_loss_with_options(monkeypatch):
    def loss(tokens, *, clip_low, scale=3.0):
        return jnp.asarray(clip_low * scale), {}

    monkeypatch.setitem(set_rl.LOSSES, "mine", loss)
    ones = jnp.ones((1, 2))
    for options, value in (({}, 1.5), ({"scale": 8.0}, 4.0)):
        mine = make_loss(algo(loss="mine", clip_low=0.5, loss_options=options))
        assert mine(set_rl.Tokens(ones, ones, ones, ones, ones))[0] == value


def test_a_custom_estimator_can_read_any_feature(graded, monkeypatch):
    def shortest_first(section):
        return Estimator(lambda key, features: -jnp.float32(features["lengths"]), ("lengths",), "Shortest first")

    monkeypatch.setitem(ADVANTAGES, "shortest_first", shortest_first)
    np.testing.assert_array_equal(advantages_of(algo(advantages="shortest_first"), *graded), -np.ones((P, N)))


def test_a_missing_feature_is_named(graded, monkeypatch):
    def novelty(rewards, embeddings):
        return rewards.mean(axis=-1)

    monkeypatch.setitem(set_rl.OBJECTIVES, "novelty", set_rl.Objective(novelty, "Novelty"))
    with pytest.raises(ValueError, match=r"Novelty .* 'embeddings'.* clusters, lengths, rewards;"):
        advantages_of(algo(objective="novelty"), *graded)


@pytest.mark.parametrize(
    ("changes", "reads", "title"),
    [
        ({}, ("rewards", "clusters"), "Poly-EPO"),
        ({"objective": "pass_at_n"}, ("rewards",), "set RL, pass@n"),
        ({"advantages": "grpo"}, ("rewards",), "GRPO"),
        ({"advantages": "grpo_div"}, ("rewards", "clusters"), "GRPO+DIV"),
    ],
)
def test_title_and_features_of_each_method(changes, reads, title):
    assert make_estimator(algo(**changes))[1:3] == (reads, title)


BASELINES = {
    "darling": (set_rl.darling_advantages, "clusters", {}, {}),
    "dqo": (set_rl.dqo_advantages, "embeddings", {"weight": 1.0}, {"weight": 0.3}),
    "entropic": (set_rl.entropic_advantages, "", {"kl": math.log(2)}, {"kl": 0.2}),
    "max_rl": (set_rl.max_rl_advantages, "", {}, {}),
    "passk": (set_rl.passk_advantages, "", {"k": 4}, {"k": 2}),
    "pkpo": (set_rl.pkpo_advantages, "", {"k": 4}, {"k": 7}),
    "rep_exp": (set_rl.rep_exp_advantages, "embeddings", {"beta": 0.01, "ridge": 0.01}, {"beta": 0.5, "ridge": 1.0}),
    "rs_grpo": (set_rl.rs_grpo_advantages, "", {"beta": 2.0}, {"beta": 5.0}),
    "set_dpp": (set_rl.set_dpp_advantages, "embeddings", {"scale": 1.0}, {"scale": 9.0}),
    "set_po": (set_rl.set_po_advantages, "embeddings", {"weight": 1.0}, {"weight": 4.0}),
    "shaped_product": (set_rl.shaped_product_advantages, "clusters", {}, {}),
    "ucpo": (set_rl.ucpo_advantages, "mean_logprob", {"tau": 0.3}, {"tau": 0.9}),
    "uniqueness": (set_rl.uniqueness_advantages, "clusters", {"alpha": 1.0}, {"alpha": 0.5}),
    "unlikeliness": (set_rl.unlikeliness_advantages, "mean_logprob", {"beta": 0.25}, {"beta": 1.0}),
}
"""By registry name: the function, the feature that it reads in addition to rewards, its defaults, and other options."""


@pytest.mark.parametrize("key", BASELINES)
def test_every_baseline_is_registered_with_its_options(key, graded):
    function, other, defaults, options = BASELINES[key]
    rng = np.random.default_rng(1)
    rewards, clusters = graded
    features = {
        "rewards": rewards,
        "clusters": clusters,
        "mean_logprob": -rng.random((P, N)).astype(np.float32),
        "embeddings": rng.normal(size=(P, N, 3)).astype(np.float32),
        "lengths": np.ones((P, N), np.int32),
    }
    arrays = [features[name] for name in ("rewards", other) if name]
    found = []
    for chosen, numbers in (({}, defaults), (options, options))[: 2 if options else 1]:
        found.append(make_advantages(algo(advantages=key, options=chosen), SEED)(STEP, PROBLEMS, features))
        expected = jax.jit(partial(function, **numbers))(*arrays)
        np.testing.assert_allclose(found[-1], expected, rtol=1e-4, atol=1e-5)
    assert not options or np.abs(found[0] - found[1]).max() > 1e-3
    estimator = make_estimator(algo(advantages=key, options=options))
    assert estimator.reads == tuple(name for name in ("rewards", other) if name)
    assert estimator.reads_judge == (other in ("clusters", "embeddings"))


def test_every_estimator_is_tested():
    assert set(BASELINES) | {"marginal_set", "grpo", "grpo_div"} == set(ADVANTAGES)


def test_titles_are_unique():
    titles = [make_estimator(algo(advantages=name)).title for name in ADVANTAGES]
    titles += [objective.title for name, objective in set_rl.OBJECTIVES.items() if name != "polychromic"]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize(("name", "gamma"), [("grpo", 0.5), ("marginal_set", 2.0), ("grpo_div", 0.5)])
def test_focal_weights(name: str, gamma: float):
    """Each prompt's advantages are multiplied by (1 - mean reward)^gamma, and are 0 if all responses are correct."""
    rng = np.random.default_rng(0)
    rewards = np.concatenate([np.ones((1, 8)), np.zeros((1, 8)), rng.integers(0, 2, (6, 8))]).astype(np.float32)
    features = {"rewards": rewards, "clusters": rng.integers(0, 4, (8, 8)).astype(np.int32)}
    problems = [Problem(str(i), "", "") for i in range(8)]
    sections = [algo(advantages=name, focal_gamma=value) for value in (0.0, gamma)]
    plain, focal = (make_advantages(section, SEED)(STEP, problems, features) for section in sections)
    expected = [row * (1 - reward.mean()) ** gamma for row, reward in zip(plain, rewards, strict=True)]
    np.testing.assert_allclose(focal, expected, rtol=1e-6, atol=1e-7)
    assert not focal[0].any() and np.abs(plain - focal).max() > 0.01


def test_focal_weights_require_only_the_rewards_in_addition():
    estimator = make_estimator(algo(advantages="grpo", focal_gamma=1.0))
    assert estimator.reads == ("rewards",) and not estimator.reads_judge and estimator.title == "GRPO, focal 1"


def with_numpy(rewards):
    return np.asarray(rewards).mean(axis=-1)


def with_condition(rewards):
    if rewards.sum() > 0:
        return rewards.mean(axis=-1)
    return rewards.min(axis=-1)


def with_wrong_axis(rewards, clusters):
    return jnp.concatenate([rewards, clusters], axis=7).sum(axis=-1)


@pytest.mark.parametrize("gamma", [0.0, 1.0])
@pytest.mark.parametrize(
    ("returned", "described"),
    [
        (lambda rewards: jnp.mean(rewards, axis=1), r"an array of shape \(1,\)"),
        (lambda rewards: None, "a NoneType"),
        (lambda rewards: [rewards], "a list"),
        (lambda rewards: (rewards, {}), "a tuple"),
    ],
)
def test_advantages_of_another_shape_are_reported_at_the_start(
    returned, described: str, gamma: float, monkeypatch: pytest.MonkeyPatch
):
    own: Any = Estimator(lambda key, features: returned(features["rewards"]), ("rewards",), "Own")
    monkeypatch.setitem(ADVANTAGES, "own", lambda algo: own)
    with pytest.raises(ConfigError, match=rf"^Own returned {described} instead of advantages of shape \(1, 8\)"):
        check_estimator(AlgoSection(advantages="own", focal_gamma=gamma), 8)


def none(rewards):
    return None


def is_solved(rewards):
    return (rewards > 0).any(axis=-1)


def test_scores_of_an_own_objective_are_checked_at_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(set_rl.OBJECTIVES, "solved", set_rl.Objective(is_solved, "Own"))
    check_estimator(AlgoSection(objective="solved"), 8)
    monkeypatch.setitem(set_rl.OBJECTIVES, "none", set_rl.Objective(none, "Own"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"^The objective none returned a NoneType"):
        check_estimator(AlgoSection(objective="none"), 8)


def with_float(tokens):
    return float(jnp.sum(tokens.logprobs)), {}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda tokens: None, "must return a scalar and a dictionary of metrics by name, but returned a NoneType; "),
        (lambda tokens: jnp.sum(tokens.logprobs), r"must return a scalar and a dictionary .* array of shape \(\); "),
        (lambda tokens: (jnp.sum(tokens.logprobs), [1.0]), "must return a scalar and a dictionary .* returned a tuple"),
        (lambda tokens: (jnp.sum(tokens.logprobs), {1: 1.0}), "must return a scalar and a dictionary .* by name"),
        (lambda tokens: (None, {}), "must return scalars, but the loss is a NoneType"),
        (lambda tokens: (jnp.sum(tokens.logprobs), {"mine": "one"}), "must return scalars, but mine is a str"),
        (with_float, rf"raised ConcretizationTypeError for 128 tokens at {re.escape(__file__)}:\d+: .*jnp\.where"),
    ],
)
def test_losses_with_invalid_results_are_reported_at_the_start(loss, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(set_rl.LOSSES, "own", loss)
    with pytest.raises(ConfigError, match=rf"^algo\.loss='own' {message}"):
        check_loss(AlgoSection(loss="own"))


@pytest.mark.parametrize("name", set_rl.LOSSES)
def test_losses_are_accepted_at_the_start(name: str):
    check_loss(AlgoSection(loss=name))


def test_the_metrics_of_a_loss_are_copied():
    """Updates add further metrics, so they would reject a dictionary that a loss returns again."""
    metrics: dict[str, Any] = {}
    assert checked_loss((0.0, metrics), "The loss")[1] is not metrics


@pytest.mark.parametrize("objective", [with_numpy, with_condition, with_wrong_axis])
def test_an_objective_that_cannot_be_compiled_is_reported_at_the_start(objective, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(set_rl.OBJECTIVES, "own", set_rl.Objective(objective, "Own"))
    with pytest.raises(ConfigError, match=rf"Own raised .* at {re.escape(__file__)}:\d+: .*jnp\.where"):
        check_estimator(AlgoSection(advantages="marginal_set", objective="own"), 8)
