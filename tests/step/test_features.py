"""Features of a batch and its minibatches: only tokens that the policy generated are counted and trained."""

import dataclasses
from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest
from fakes import PROBLEMS, group

from poly_epo_jax.step.advantages import OWN_FEATURES, batch_features
from poly_epo_jax.step.minibatches import MinibatchPacker
from poly_epo_jax.step.packing import ZeroAdvantageBatch, pack
from poly_epo_jax.types import Clustering, GradedGroup, JudgeFailure

PACK = partial(pack, row_tokens=8, rows_per_microbatch=1)


def graded(
    clusters: list[int] | None = None, reply: bool = False, features: Mapping[str, np.ndarray] | None = None
) -> GradedGroup:
    """Creates two generations of two tokens. If `reply` is True, the policy did not generate their first tokens."""
    made = group(PROBLEMS[0], ["a", "b"])
    if reply:
        mask = np.array([False, True])
        logprobs = [np.array([0.0, -2.0], np.float32), np.array([0.0, -4.0], np.float32)]
        generations = [
            dataclasses.replace(y, loss_mask=mask, logprobs=values)
            for y, values in zip(made.generations, logprobs, strict=True)
        ]
        made = dataclasses.replace(made, generations=tuple(generations))
    clustering = None if clusters is None else Clustering(np.array(clusters, np.int32), features=features or {})
    rewards = np.array([1.0, 0.5], np.float32)
    return GradedGroup(made, rewards, rewards == 1, clustering)


def test_features_only_use_tokens_of_the_policy():
    features = batch_features([graded([0, 1], reply=True), graded([2, 2])])
    assert {name: values.tolist() for name, values in features.items()} == {
        "rewards": [[1.0, 0.5], [1.0, 0.5]],
        "clusters": [[0, 1], [2, 2]],
        "lengths": [[1, 1], [2, 2]],
        "mean_logprob": [[-2.0, -4.0], [-1.0, -1.0]],
    }


def test_features_of_the_judge_are_included():
    embeddings = np.arange(6.0).reshape(2, 3)
    features = batch_features([graded([0, 1], features={"embeddings": embeddings})] * 2)
    np.testing.assert_array_equal(features["embeddings"], np.stack([embeddings] * 2))


def test_features_of_different_shapes_are_rejected():
    groups = [graded([0, 1], features={"embeddings": np.zeros((2, size))}) for size in (3, 4)]
    with pytest.raises(ValueError, match=r"judge's feature 'embeddings' .*different shapes"):
        batch_features(groups)


@pytest.mark.parametrize("name", ["embeddings", "rewards"])
def test_incomplete_features_and_reserved_names_are_rejected(name: str):
    added = {name: np.zeros(2)}
    groups = [graded([0, 1], features=added), graded([0, 1], features=added if name == "rewards" else None)]
    with pytest.raises(ValueError, match=f"judge's feature '{name}'"):
        batch_features(groups)


def test_without_a_judge_there_are_no_clusters():
    features = batch_features([graded(), graded()])
    assert sorted(features) == sorted(OWN_FEATURES) == ["lengths", "mean_logprob", "rewards"]


def test_without_clusters_for_every_group_there_are_no_judge_features():
    failed = dataclasses.replace(graded(), clustering=JudgeFailure("broken", "out of order"))
    features = batch_features([graded([0, 1], features={"embeddings": np.zeros((2, 3))}), failed])
    assert sorted(features) == sorted(OWN_FEATURES)
    assert {len(values) for values in features.values()} == {2}


@pytest.mark.parametrize(("normalization", "weight"), [("own", 1 / (2 * 1)), ("max", 1 / (2 * 8))])
def test_reply_tokens_are_not_trained(normalization: str, weight: float):
    packer = MinibatchPacker(2, PACK, length_normalization=normalization, max_tokens=8)
    first, second = packer([graded([0, 1], reply=True), graded([0, 1])], np.array([[3.0, -3.0], [1.0, -1.0]]))
    (batch,) = first
    # Two prompt tokens, a reply token and a token of the policy. Entry t describes the prediction of token t + 1.
    np.testing.assert_allclose(batch.weights[0, :4], [0, 0, weight, 0])
    assert batch.advantages[0, 2] == 3.0
    assert (second[0].weights > 0).sum() == 4


def test_zero_advantage_sequences_are_packed_separately_if_this_saves_time():
    """Rows hold two sequences, and a gradient costs three times as much as a forward pass."""
    skip = MinibatchPacker(1, PACK, length_normalization="own", max_tokens=8, skip_zero_advantage=True)

    def rows(*advantages: float) -> list[bool]:
        (minibatch,) = skip([graded([0, 1])] * (len(advantages) // 2), np.array(advantages).reshape(-1, 2))
        assert sum(int((batch.weights > 0).sum()) for batch in minibatch) == 2 * len(advantages)
        assert not any(np.any(batch.advantages) for batch in minibatch if isinstance(batch, ZeroAdvantageBatch))
        return [isinstance(batch, ZeroAdvantageBatch) for batch in minibatch]

    assert rows(1.0, -1.0, 0.0, 0.0) == [False, True]
    assert rows(0.0, 0.0) == [True]
    assert rows(1.0, 0.0) == [False]
    assert rows(1.0, 0.0, 0.0, 0.0) == [False, True, True]
    assert rows(1.0, 1.0, 1.0, 0.0) == [False, False]
    assert rows(1.0, -1.0) == [False]


@pytest.mark.parametrize(
    ("left", "sizes"), [(8, [2, 2, 2, 2]), (7, [2, 2, 2, 1]), (5, [2, 1, 1, 1]), (3, [1, 1, 1, 0]), (0, [0, 0, 0, 0])]
)
def test_remaining_prompts_are_spread_over_all_minibatches(left: int, sizes: list[int]):
    packer = MinibatchPacker(4, PACK, length_normalization="own", max_tokens=8)
    advantages = np.arange(1.0, 2 * left + 1).reshape(left, 2)
    minibatches = packer([graded([0, 1])] * left, advantages)
    trained = [[batch.advantages[batch.weights > 0] for batch in minibatch] for minibatch in minibatches]
    assert [sum(map(len, one)) for one in trained] == [4 * size for size in sizes]  # two responses of two tokens
    flat = [float(value) for one in trained for values in one for value in np.unique(values)]
    assert flat == advantages.ravel().tolist()
    # Each minibatch is a mean over its own prompts.
    weights = [sum(float(batch.weights.sum()) for batch in minibatch) for minibatch in minibatches]
    assert weights == pytest.approx([2 / 2 * (size > 0) for size in sizes])
