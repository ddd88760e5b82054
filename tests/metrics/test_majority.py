"""Tests of majority@k against an enumeration of all subsets of k generations."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from poly_epo_jax.metrics.majority import majority_at_k


def by_hand(answers: list[int], correct: list[bool], k: int) -> tuple[float, float]:
    """Returns the accuracy and vote share of one problem."""
    accuracies, shares = [], []
    for subset in itertools.combinations(range(len(answers)), k):
        votes = Counter(answers[i] for i in subset if answers[i] != -1)
        most = max(votes.values(), default=0)
        winners = [answer for answer, count in votes.items() if count == most]
        accuracies.append(np.mean([correct[answers.index(answer)] for answer in winners]) if winners else 0.0)
        shares.append(most / k)
    return float(np.mean(accuracies)), float(np.mean(shares))


def random_votes(num_problems: int, num_generations: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns answers with few ids, so that ties and missing answers are frequent. Several ids may be correct."""
    rng = np.random.default_rng(seed)
    answers = rng.choice([-1, 0, 3, 1000], size=(num_problems, num_generations))
    is_correct = rng.random((num_problems, 1001)) < 0.4
    return answers, np.take_along_axis(is_correct, answers, axis=1) & (answers >= 0)


@pytest.mark.parametrize("k", range(1, 8))
def test_the_result_is_the_mean_over_all_subsets(k):
    answers, correct = random_votes(40, 7, seed=k)
    expected = [by_hand(*votes, k) for votes in zip(answers.tolist(), correct.tolist(), strict=True)]
    accuracy, vote_share = majority_at_k(answers, correct, k)
    np.testing.assert_allclose(np.stack([accuracy, vote_share], axis=1), expected, atol=1e-12)


def test_ties_and_missing_answers():
    answers = np.array(
        [
            [0, 0, 1, 2],  # The correct answer wins.
            [0, 0, 1, 1],  # A tie between a correct and an incorrect answer.
            [0, 1, 2, 3],  # A tie of four answers, one of them correct.
            [5, -1, -1, -1],  # A single vote wins.
            [-1, -1, -1, -1],  # No votes.
            [2, 2, 2, 0],  # An incorrect answer wins.
        ]
    )
    correct = (answers == 0) | (answers == 5)
    accuracy, vote_share = majority_at_k(answers, correct, 4)
    assert accuracy.tolist() == [1, 0.5, 0.25, 1, 0, 0]
    assert vote_share.tolist() == [0.5, 0.5, 0.25, 0.25, 0, 0.75]


def test_a_missing_answer_is_never_correct():
    answers = np.array([[-1, -1, 0]])
    marked_by_mistake = np.array([[True, False, False]])
    assert majority_at_k(answers, marked_by_mistake, 2)[0] == 0


def test_a_single_vote_gives_the_mean_and_all_votes_are_a_single_subset():
    answers, correct = random_votes(20, 64)
    np.testing.assert_allclose(majority_at_k(answers, correct, 1)[0], correct.mean(axis=1), atol=1e-12)
    drawn = [majority_at_k(answers, correct, 64, num_subsets=1, seed=seed) for seed in (0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])


def test_the_result_does_not_depend_on_the_order_of_generations():
    answers, correct = random_votes(20, 8)
    shuffled = np.random.default_rng(1).permutation(8)
    exact = majority_at_k(answers, correct, 3)
    np.testing.assert_allclose(majority_at_k(answers[:, shuffled], correct[:, shuffled], 3), exact, atol=1e-12)


def test_random_subsets_estimate_the_exact_mean():
    answers, correct = random_votes(30, 12)
    # Equal answers are adjacent, so that the test detects subsets that favor some positions.
    order = np.argsort(answers, axis=1)
    answers, correct = np.take_along_axis(answers, order, axis=1), np.take_along_axis(correct, order, axis=1)
    all_subsets = math.comb(12, 5)
    exact = np.array(majority_at_k(answers, correct, 5, all_subsets))
    np.testing.assert_array_equal(majority_at_k(answers, correct, 5, all_subsets + 1, seed=1), exact)
    drawn, again, other = (
        np.array(majority_at_k(answers, correct, 5, all_subsets - 1, seed=seed)) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(drawn, again)
    assert np.any(drawn != exact) and np.any(drawn != other)
    # The standard deviation of values in [0, 1] is at most 1/2. The tolerance is 4.5 standard errors.
    assert np.all(np.abs(drawn - exact) < 4.5 * 0.5 / math.sqrt(all_subsets - 1))


def test_a_large_benchmark():
    """In each of 500 problems, 48 of 64 generations agree. Among 33 votes, their answer always wins."""
    answers = np.tile(np.where(np.arange(64) % 4 == 0, np.arange(64), 1), (500, 1))
    accuracy, vote_share = majority_at_k(answers, answers == 1, 33, num_subsets=200)
    np.testing.assert_array_equal(accuracy, np.ones(500))
    # The number of votes is hypergeometric. The tolerance is 4.5 standard errors of the mean over 200 subsets.
    deviation = math.sqrt(0.75 * 0.25 / 33 * (64 - 33) / 63 / 200)
    assert np.all(np.abs(vote_share - 0.75) < 4.5 * deviation)


@pytest.mark.parametrize(
    ("answers", "correct", "k", "num_subsets", "complaint"),
    [
        ([[0, 1]], [[True, False]], 3, 10, "k=3 .* 1 and .* 2"),
        ([[0, 1]], [[True, False]], 0, 10, "k=0 .* 1 and .* 2"),
        ([[0, -2]], [[True, False]], 1, 10, "ids, or -1"),
        ([[4, 7, 7]], [[True, True, False]], 1, 10, "id 7"),
    ],
)
def test_invalid_arguments_are_rejected(answers, correct, k, num_subsets, complaint):
    with pytest.raises(ValueError, match=complaint):
        majority_at_k(np.array(answers), np.array(correct), k, num_subsets)
