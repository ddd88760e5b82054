"""Truncated responses and the mean over tokens, compared with a transcription in float64 that uses loops."""

import dataclasses
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import PROBLEMS, RandomLetters
from tiny_training import tiny_config, tiny_update, train_tiny

from configs import polaris
from poly_epo_jax import set_rl
from poly_epo_jax.records.run_folder import GENERATIONS, METRICS, read_rows
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.step.advantages import method_title
from poly_epo_jax.step.minibatches import MinibatchPacker
from poly_epo_jax.step.packing import PackedBatch, pack
from poly_epo_jax.step.truncation import Truncation, make_truncation
from poly_epo_jax.types import DEGENERATE_CLUSTER, Clustering, Completion, Generation, GradedGroup, Group

MAX_TOKENS, OVERLONG_TOKENS, COEF = 20, 5, 0.5
PENALIZE = Truncation("penalize", MAX_TOKENS, OVERLONG_TOKENS, COEF)
MASK = Truncation("mask", MAX_TOKENS)


def generation(length: int, truncated: bool, reply: int = 0, token: int = 5) -> Generation:
    """Returns a response of `length` tokens. A reply of the task precedes its last `length - reply` tokens."""
    mask = np.arange(length) >= reply
    mask[0] = True
    ids = np.full(length, token, np.int32)
    return Generation(
        ids, np.full(length, -1, np.float32), mask, ("",), "length" if truncated else "stop", np.zeros(length, np.int32)
    )


def graded(generations: list[Generation], clusters: list[int] | None = None, rewards: Any = 0) -> GradedGroup:
    group = Group(PROBLEMS[0], np.array([7, 8], np.int32), tuple(generations))
    values = np.broadcast_to(np.asarray(rewards, np.float32), len(generations))
    clustering = None if clusters is None else Clustering(np.array(clusters, np.int32))
    return GradedGroup(group, values, values == 1, clustering)


def random_batch(rng: np.random.Generator, num_groups: int, size: int = 6) -> list[GradedGroup]:
    """Returns groups of responses of 1 to MAX_TOKENS tokens, about a third of them truncated."""

    def response() -> Generation:
        truncated = rng.random() < 1 / 3
        length = MAX_TOKENS if truncated and rng.random() < 0.7 else int(rng.integers(2, MAX_TOKENS + 1))
        return generation(length, truncated, reply=int(rng.integers(0, length)))

    return [graded([response() for _ in range(size)], rewards=rng.integers(0, 2, size)) for _ in range(num_groups)]


def soft_overlong(length: int, truncated: bool) -> float:
    """Transcribes the soft overlong punishment of DAPO with the opposite sign.

    L_max is MAX_TOKENS, and L_cache is OVERLONG_TOKENS.
    """
    if truncated or length > MAX_TOKENS:
        return 1.0
    if length <= MAX_TOKENS - OVERLONG_TOKENS:
        return 0.0
    return (length - (MAX_TOKENS - OVERLONG_TOKENS)) / OVERLONG_TOKENS


def polychromic(rewards: np.ndarray, clusters: np.ndarray, set_size: int) -> np.ndarray:
    return np.asarray(jax.jit(set_rl.polychromic_advantages, static_argnums=2)(rewards, clusters, set_size))


def test_the_penalty_is_that_of_dapo_in_the_reward_of_grpo():
    batch = random_batch(np.random.default_rng(0), 50)
    rewards = np.stack([group.rewards for group in batch])
    advantages, metrics = PENALIZE(batch, np.asarray(set_rl.grpo_advantages(rewards)))
    total, penalties = 0.0, set()
    for group, found in zip(batch, advantages, strict=True):
        own = [COEF * soft_overlong(len(y.token_ids), y.finish_reason == "length") for y in group.group.generations]
        shaped = [float(r) - c for r, c in zip(group.rewards, own, strict=True)]
        expected = [value - sum(shaped) / len(shaped) for value in shaped]
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-7)
        total += sum(own)
        penalties |= {*own}
    assert {0.0, COEF} < penalties and len(penalties) == OVERLONG_TOKENS + 1
    assert metrics == pytest.approx({"response/penalty": total / rewards.size})
    assert advantages.dtype == np.float32


@pytest.mark.parametrize(
    ("overlong_tokens", "penalized"), [(1, [0, 0, 0, 1]), (2, [0, 0, 0.5, 1]), (MAX_TOKENS, [0.05, 0.9, 0.95, 1])]
)
def test_the_penalty_grows_over_the_last_tokens(overlong_tokens: int, penalized: list[float]):
    group = graded([generation(length, False) for length in (1, 18, 19, 20)])
    found, _ = Truncation("penalize", MAX_TOKENS, overlong_tokens, 1.0)([group], np.zeros((1, 4), np.float32))
    np.testing.assert_allclose(found[0], np.mean(penalized) - np.array(penalized), atol=1e-6)


def test_responses_with_equal_penalties_keep_their_advantages_exactly():
    advantages = np.array([[0.3, -0.1, -0.2]], np.float32)
    for length, truncated in ((MAX_TOKENS, True), (18, False), (3, False)):
        found, _ = PENALIZE([graded([generation(length, truncated)] * 3)], advantages)
        np.testing.assert_array_equal(found, advantages)


@pytest.mark.parametrize("method", [PENALIZE, MASK, Truncation()])
def test_a_batch_without_groups_or_truncated_responses_is_unchanged(method: Truncation):
    empty, metrics = method([], np.zeros((0, 4), np.float32))
    assert empty.shape == (0, 4) and not any(metrics.values())
    advantages = np.array([[0.5, -0.5]], np.float32)
    found, metrics = method([graded([generation(2, False), generation(9, False)])], advantages)
    np.testing.assert_array_equal(found, advantages)
    assert not any(metrics.values())


def test_the_cluster_does_not_change_the_treatment_of_truncated_responses():
    """Loops in cluster 100, other truncated responses, and complete responses, with the advantages of Poly-EPO."""
    clusters = [1, 1, 2, 3, DEGENERATE_CLUSTER, DEGENERATE_CLUSTER, DEGENERATE_CLUSTER]
    lengths = [(4, False), (5, False), (20, True), (6, False), (20, True), (20, True), (7, False)]
    rewards = [1, 1, 0, 0, 0, 0, 0]
    group = graded([generation(*length) for length in lengths], clusters, rewards)
    plain = polychromic(np.array([rewards]), np.array([clusters]), 3)
    masked, metrics = MASK([group], plain)
    is_truncated = np.array([[truncated for _, truncated in lengths]])
    np.testing.assert_array_equal(np.isnan(masked), is_truncated)
    np.testing.assert_array_equal(masked[~is_truncated], plain[~is_truncated])
    assert metrics == {"response/masked": 3.0}

    penalized, _ = PENALIZE([group], plain)
    np.testing.assert_allclose((penalized - plain)[is_truncated], COEF * (3 / 7 - 1), atol=1e-6)
    np.testing.assert_allclose((penalized - plain)[~is_truncated], COEF * 3 / 7, atol=1e-6)
    assert plain[0, 4] == plain[0, 6] and penalized[0, 4] < penalized[0, 6]  # only truncated loops are penalized


def test_a_penalty_in_the_reward_would_prefer_equal_truncated_responses():
    """The reason for the penalty after the estimator: with negative rewards, a new strategy lowers the set's score."""
    clusters, group = np.array([[1, 1, 1, 2]]), graded([generation(MAX_TOKENS, True)] * 4, [1, 1, 1, 2])
    in_reward = polychromic(np.full((1, 4), -COEF), clusters, 2)
    assert in_reward[0, 3] < 0 < in_reward[0, 0]
    after = PENALIZE([group], polychromic(np.zeros((1, 4)), clusters, 2))[0]
    np.testing.assert_array_equal(after, np.zeros((1, 4)))


def packer(normalization: str, num_minibatches: int, rows: int) -> MinibatchPacker:
    pack_rows = partial(pack, row_tokens=2 * MAX_TOKENS, rows_per_microbatch=rows)
    return MinibatchPacker(num_minibatches, pack_rows, normalization, MAX_TOKENS)


@jax.jit
@jax.grad
def loss_gradient(logprobs: jax.Array, batch: PackedBatch) -> jax.Array:
    fixed = jax.lax.stop_gradient(logprobs)
    tokens = set_rl.Tokens(logprobs, fixed, *map(jnp.asarray, (batch.advantages, batch.weights, batch.segment_ids)))
    return set_rl.ppo_clip_loss(tokens)[0]


def token_gradients(minibatch: list[PackedBatch]) -> list[float]:
    """Returns the sorted derivatives of the minibatch's loss by the log-probabilities of its trained tokens."""

    found = []
    for batch in minibatch:
        gradient = np.asarray(loss_gradient(batch.sampler_logprobs, batch))
        assert not gradient[batch.weights == 0].any()
        found += gradient[batch.weights > 0].tolist()
    return sorted(found)


@pytest.mark.parametrize("method", [MASK, PENALIZE], ids=lambda method: method.mode)
@pytest.mark.parametrize("normalization", ["own", "max", "token"])
def test_the_gradient_of_each_token_has_the_denominator_of_its_update(normalization: str, method: Truncation):
    """Two updates of several microbatches. The denominators are those of an update, not of a microbatch or batch."""
    batch, rng = random_batch(np.random.default_rng(1), 7), np.random.default_rng(2)
    advantages, _ = method(batch, rng.normal(size=(7, 6)).astype(np.float32))
    by_rows = [packer(normalization, 2, rows)(batch, advantages) for rows in (1, 3)]
    for index, groups in enumerate((range(4), range(4, 7))):
        expected = []
        trained = [
            (int(y.loss_mask.sum()), float(a))
            for p in groups
            for y, a in zip(batch[p].group.generations, advantages[p].astype(float), strict=True)
            if not (method is MASK and y.finish_reason == "length")
        ]
        num_tokens = sum(length for length, _ in trained)
        for length, advantage in trained:
            divisor = {"own": length, "max": MAX_TOKENS, "token": num_tokens / (len(groups) * 6)}[normalization]
            expected += [-advantage / (len(groups) * 6 * divisor)] * length
        assert method is PENALIZE or len(trained) < 0.9 * len(groups) * 6
        for minibatches in by_rows:
            assert len(minibatches[index]) > 1
            np.testing.assert_allclose(token_gradients(minibatches[index]), sorted(expected), rtol=1e-6, atol=1e-9)
            if normalization == "token":
                assert sum(float(part.weights.sum()) for part in minibatches[index]) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("normalization", ["own", "max", "token"])
def test_masked_responses_have_no_effect_on_the_packed_batches(normalization: str):
    """Their tokens do not reach the model, so the gradient of all terms of the objective is exactly 0."""
    batch = random_batch(np.random.default_rng(3), 4)
    changed = [
        dataclasses.replace(
            one,
            group=dataclasses.replace(
                one.group,
                generations=tuple(
                    generation(11, True, token=9) if y.finish_reason == "length" else y for y in one.group.generations
                ),
            ),
        )
        for one in batch
    ]
    advantages = np.random.default_rng(4).normal(size=(4, 6)).astype(np.float32)
    for skip in (False, True):
        make = dataclasses.replace(packer(normalization, 2, 3), skip_zero_advantage=skip)
        first, second = (make(one, MASK(one, advantages)[0]) for one in (batch, changed))
        assert [len(one) for one in first] == [len(one) for one in second]
        for one, other in zip(itertools.chain(*first), itertools.chain(*second), strict=True):
            assert type(one) is type(other)
            for found, expected in zip(one, other, strict=True):
                np.testing.assert_array_equal(found, expected)


def test_an_update_without_trained_responses_is_empty():
    batch = [graded([generation(MAX_TOKENS, True)] * 2), graded([generation(3, False)] * 2)]
    advantages, _ = MASK(batch, np.array([[1, -1], [1, -1]], np.float32))
    empty, other = packer("token", 2, 1)(batch, advantages)
    assert empty == [] and len(other) == 1


@pytest.mark.parametrize(("names", "overlong_tokens"), [("dapo", 819), ("dapo,h200x4", 819)])
def test_the_preset_has_the_values_of_dapo(names: str, overlong_tokens: int):
    config = read_config(polaris.get_config(names))
    algo = config.algo
    assert (algo.advantages, algo.length_normalization, algo.truncated) == ("grpo", "token", "penalize")
    assert (algo.clip_low, algo.clip_high, algo.kl_coef, algo.entropy_coef) == (0.2, 0.28, 0, 0)
    assert make_truncation(config) == Truncation("penalize", 4096, overlong_tokens, 0.5)
    assert method_title(algo) == "GRPO, overlong penalty"


def test_the_default_length_is_that_of_dapo():
    config = polaris.get_config("dapo")
    config.sampling.max_tokens, config.train.row_tokens = 20_480, 0
    assert make_truncation(read_config(config)).overlong_tokens == 4096
    config.sampling.max_tokens = 1
    assert make_truncation(read_config(config)).overlong_tokens == 1
    config.algo.overlong_tokens = 1
    assert make_truncation(read_config(config)).overlong_tokens == 1


class Truncating(RandomLetters):
    """A sampler whose responses with the letter d reach the token limit."""

    def completion(self, place: int, index: int, text: str) -> Completion:
        completion = super().completion(place, index, text)
        if text != "d":
            return completion
        cut = {name: getattr(completion, name)[:-1] for name in ("token_ids", "logprobs", "weight_versions")}
        return dataclasses.replace(completion, finish_reason="length", **cut)


@pytest.mark.slow
def test_a_run_records_the_advantages_that_it_trains_with(tmp_path: Path):
    changes = {"eval.every": 0, "train.num_steps": 1}
    update = tiny_update(tiny_config(**changes))
    for mode in ("mask", "penalize"):
        train_tiny(tmp_path / mode, sampler=Truncating(), update=update, changes={**changes, "algo.truncated": mode})
        (row,) = read_rows(tmp_path / mode / METRICS)
        rows = read_rows(tmp_path / mode / GENERATIONS)
        is_truncated = np.array([one["response"] == "d" for one in rows])
        assert 0 < is_truncated.sum() < len(rows) and row["response/truncated"] == pytest.approx(is_truncated.mean())
        if mode == "mask":
            assert row["response/masked"] == is_truncated.sum()
            assert [one["advantage"] is None for one in rows] == is_truncated.tolist()
        else:
            sums = np.array([one["advantage"] for one in rows]).reshape(-1, 8).sum(axis=1)
            np.testing.assert_allclose(sums, 0, atol=1e-6)
            assert row["response/penalty"] > 0
