"""Groups with M of N generations: advantages, truncation and packing use only the M generations."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from poly_epo_jax import set_rl
from poly_epo_jax.config.keys import AlgoSection, Config, RolloutsSection
from poly_epo_jax.step.advantages import ADVANTAGES, make_advantages
from poly_epo_jax.step.minibatches import MinibatchPacker
from poly_epo_jax.step.packing import pack
from poly_epo_jax.step.partial_groups import group_advantages, min_group
from poly_epo_jax.step.truncation import Truncation
from poly_epo_jax.types import Clustering, EnvironmentFailure, Generation, GradedGroup, Group, Problem

N, SIZES, SET_SIZE, SEED, STEP, MAX_TOKENS = 7, [7, 5, 7, 5], 3, 1, 2, 9
FAILURE = EnvironmentFailure("failed", "out of order")


def made() -> tuple[list[GradedGroup], list[dict[str, np.ndarray]]]:
    """Returns groups of `SIZES` generations, and the feature arrays [1, M] of each group."""
    rng, groups, features = np.random.default_rng(0), [], []
    for place, size in enumerate(SIZES):
        lengths = rng.integers(1, MAX_TOKENS, size)
        logprobs = [-rng.random(length).astype(np.float32) for length in lengths]
        generations = tuple(
            Generation(np.full(length, place), values, np.ones(length, bool), ("",), "stop", np.zeros(length, int))
            for length, values in zip(lengths.tolist(), logprobs, strict=True)
        )
        rewards, ids = rng.random(size).astype(np.float32), rng.integers(0, 3, size).astype(np.int32)
        embeddings = rng.normal(size=(size, 3)).astype(np.float32)
        failures = dict.fromkeys(rng.choice(N, N - size, replace=False).tolist(), FAILURE)
        group = Group(Problem(str(place), "", ""), np.array([1, 2]), generations, failures)
        groups.append(GradedGroup(group, rewards, rewards > 0.5, Clustering(ids, features={"embeddings": embeddings})))
        means = np.array([values.mean() for values in logprobs], np.float32)
        arrays = {"rewards": rewards, "clusters": ids, "embeddings": embeddings, "mean_logprob": means}
        features.append({name: array[None] for name, array in (arrays | {"lengths": lengths}).items()})
    return groups, features


def test_advantages_of_every_estimator_are_those_of_the_remaining_generations():
    groups, features = made()
    sampled = {"objective": "pass_at_n", "num_sets": 20}  # more than the 10 sets of 5 generations
    methods: list[dict[str, Any]] = [{"advantages": name} for name in ADVANTAGES] + [sampled]
    for method in methods:
        compiled = make_advantages(AlgoSection(set_size=SET_SIZE, **method), SEED)
        found = group_advantages(compiled, STEP, groups, N)
        for row, group, arrays in zip(found, groups, features, strict=True):
            size = len(group.rewards)
            np.testing.assert_array_equal(row[:size], compiled(STEP, [group.group.problem], arrays)[0], str(method))
            assert np.isnan(row[size:]).all() and np.abs(row[:size]).max() > 1e-3, method


@pytest.mark.parametrize("num_sets", [0, 20])
def test_all_sets_of_the_remaining_generations_are_used(num_sets: int):
    groups, features = made()
    algo = AlgoSection(set_size=SET_SIZE, objective="pass_at_n", num_sets=num_sets)
    found = group_advantages(make_advantages(algo, SEED), STEP, groups[1:2], N)
    sets = set_rl.enumerate_sets(5, SET_SIZE)
    expected = set_rl.marginal_set_advantages(set_rl.pass_at_n, sets, rewards=features[1]["rewards"])
    np.testing.assert_allclose(found[:, :5], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("algo", "demanded", "expected"),
    [
        ({"advantages": "grpo"}, 0, 2),
        ({"advantages": "passk", "options": {"k": 4}}, 0, 5),
        ({"advantages": "marginal_set", "set_size": 4}, 3, 5),
        ({"advantages": "marginal_set", "set_size": 4, "focal_gamma": 1.0}, 7, 7),
    ],
)
def test_the_minimum_number_of_generations(algo: dict[str, Any], demanded: int, expected: int):
    assert min_group(Config(algo=AlgoSection(**algo), rollouts=RolloutsSection(min_group=demanded))) == expected


@pytest.mark.parametrize("mode", ["train", "mask", "penalize"])
@pytest.mark.parametrize("normalization", ["own", "max", "token"])
def test_only_the_remaining_generations_are_packed(normalization: str, mode: str):
    """The loss is a mean over the prompts, and over the M generations of each prompt or over all tokens."""
    groups, _ = made()
    advantages = np.full((len(SIZES), N), np.nan, np.float32)
    for row, group in zip(advantages, groups, strict=True):
        row[: len(group.rewards)] = group.rewards
    given, metrics = Truncation(mode, MAX_TOKENS, 4, 0.5)(groups, advantages)
    assert np.array_equal(np.isnan(given), np.isnan(advantages)) and np.isfinite(list(metrics.values())).all()
    (batches,) = MinibatchPacker(1, partial(pack, row_tokens=40, rows_per_microbatch=8), normalization, MAX_TOKENS)(
        groups, given
    )
    num_tokens = sum(len(y.token_ids) for group in groups for y in group.group.generations)
    found, expected = [], []
    for batch in batches:
        is_trained = batch.weights > 0
        found += zip(batch.advantages[is_trained].tolist(), batch.weights[is_trained].tolist(), strict=True)
    for group in groups:
        lengths = [len(y.token_ids) for y in group.group.generations]
        penalties = [0.5 * max(0, length - (MAX_TOKENS - 4)) / 4 * (mode == "penalize") for length in lengths]
        for length, reward, penalty in zip(lengths, group.rewards.tolist(), penalties, strict=True):
            weight = {"own": 1 / length, "max": 1 / MAX_TOKENS, "token": 0}[normalization] / len(groups) / len(lengths)
            advantage = reward - penalty + np.mean(penalties)
            expected += [(advantage, weight or 1 / num_tokens)] * length
    assert len(found) == len(expected) == num_tokens
    np.testing.assert_allclose(sorted(found), sorted(expected), rtol=1e-5, atol=1e-7)
