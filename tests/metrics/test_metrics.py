"""Tests of pass@k and distinct clusters against an enumeration of subsets and exact rationals."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from poly_epo_jax.metrics.diversity import correct_clusters, degenerate_share, distinct_clusters, incorrect_clusters
from poly_epo_jax.metrics.evaluation import omissions, problem_values
from poly_epo_jax.metrics.majority import NO_ANSWER
from poly_epo_jax.metrics.pass_at_k import best_of_k, is_covered, pass_at_k


@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_generation(k):
    for num_correct in range(7):
        is_correct = [i < num_correct for i in range(6)]
        subsets = [any(subset) for subset in itertools.combinations(is_correct, k)]
        np.testing.assert_allclose(pass_at_k(6, np.array([num_correct]), k), [np.mean(subsets)], atol=1e-12)


def test_pass_at_k_for_all_k_and_several_problems():
    num_correct = np.array([0, 1, 3, 3, 8])
    curve = np.array([pass_at_k(8, num_correct, k) for k in range(1, 9)])
    np.testing.assert_allclose(curve[0], num_correct / 8, atol=1e-12)
    np.testing.assert_array_equal(curve[-1], num_correct > 0)
    assert np.all(np.diff(curve[:, 1:4], axis=0)[:5] > 0)
    assert pass_at_k(8, np.array([], int), 3).shape == (0,)


@pytest.mark.parametrize(("num_generations", "k"), [(1024, 1), (1024, 256), (10_000, 100), (10_000, 10_000)])
def test_pass_at_k_is_exact_for_many_generations(num_generations, k):
    num_correct = np.array([0, 1, 7, num_generations // 2, num_generations - 1, num_generations])
    exact = [
        float(1 - Fraction(math.comb(num_generations - int(c), k), math.comb(num_generations, k))) for c in num_correct
    ]
    estimate = pass_at_k(num_generations, num_correct, k)
    assert estimate.dtype == np.float64
    np.testing.assert_allclose(estimate, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tau", ["0.2", "0.3", "0.5", "0.8", "1"])
def test_a_problem_is_covered_from_the_fraction_tau_on(tau):
    for m in range(1, 31):
        correct = np.tril(np.ones((m + 1, m), bool), -1)  # row c has c correct generations
        exact = [Fraction(c, m) >= Fraction(tau) for c in range(m + 1)]
        np.testing.assert_array_equal(is_covered(float(tau), correct), exact)


@pytest.mark.parametrize("k", [0, 5])
def test_invalid_k_is_rejected(k):
    with pytest.raises(ValueError, match=f"k={k} must lie between 1 and num_generations=4"):
        pass_at_k(4, np.array([1]), k)
    with pytest.raises(ValueError, match=f"k={k} must lie between 1 and num_generations=4"):
        distinct_clusters(np.zeros((1, 4), int), np.ones((1, 4), bool), k)


@pytest.mark.parametrize("num_correct", [-1, 5])
def test_invalid_numbers_of_correct_generations_are_rejected(num_correct):
    with pytest.raises(ValueError, match=r"num_correct .* num_generations=4"):
        pass_at_k(4, np.array([1, num_correct]), 2)


@pytest.mark.parametrize("k", range(1, 8))
def test_distinct_clusters_equals_the_mean_over_subsets(k):
    rng = np.random.default_rng(k)
    clusters, selected = rng.integers(0, 4, (5, 7)), rng.random((5, 7)) > 0.4
    expected = [
        np.mean(
            [
                len({int(clusters[prompt, i]) for i in subset if selected[prompt, i]})
                for subset in itertools.combinations(range(7), k)
            ]
        )
        for prompt in range(5)
    ]
    np.testing.assert_allclose(distinct_clusters(clusters, selected, k), expected, atol=1e-12)


def test_distinct_clusters_of_all_generations_is_the_number_of_clusters():
    clusters = np.array([[1, 1, 2, 100], [3, 3, 3, 3], [1, 2, 3, 4]])
    selected = np.array([[True, True, True, False], [True] * 4, [False] * 4])
    assert distinct_clusters(clusters, selected, 4).tolist() == [2.0, 1.0, 0.0]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_correct_and_incorrect_clusters_exclude_degenerate_responses(k):
    clusters = np.array([[1, 1, 2, 100], [100, 100, 3, 1]])
    correct = np.array([[True, False, True, True], [False, True, False, False]])
    for function, wanted in ((correct_clusters, True), (incorrect_clusters, False)):
        for prompt in range(2):
            counted = [i for i in range(4) if clusters[prompt, i] != 100 and correct[prompt, i] == wanted]
            subsets = itertools.combinations(range(4), k)
            mean = np.mean([len({clusters[prompt, i] for i in subset if i in counted}) for subset in subsets])
            assert function(clusters, correct, k)[prompt] == pytest.approx(mean)
    assert degenerate_share(clusters) == 3 / 8


@pytest.mark.parametrize("k", [1, 2, 5, 7])
def test_best_of_k_is_the_mean_over_all_subsets(k: int):
    rewards = np.random.default_rng(k).choice([0.0, 0.25, 0.3, 0.7, 1.0], (6, 7))
    expected = [np.mean([max(subset) for subset in itertools.combinations(row, k)]) for row in rewards]
    np.testing.assert_allclose(best_of_k(rewards, k), expected, rtol=1e-12)
    correct = rewards == 1.0
    np.testing.assert_allclose(best_of_k(correct.astype(float), k), pass_at_k(7, correct.sum(axis=1), k), atol=1e-12)


def test_graded_rewards_have_their_own_metrics():
    correct = np.array([[True, False], [False, False]])
    binary = problem_values({"rewards": correct.astype(np.float32), "correct": correct})
    graded = problem_values({"rewards": np.array([[1.0, 0.5], [0.25, 0.75]]), "correct": correct})
    assert not {"mean_reward", "best_reward@1"} & binary.keys() and binary["pass@1"].tolist() == [0.5, 0.0]
    assert graded["mean_reward"].tolist() == [0.75, 0.5] and graded["best_reward@2"].tolist() == [1.0, 0.75]


def test_majority_is_omitted_without_answers():
    correct = np.array([[True, False]])
    without = problem_values({"correct": correct, "answers": np.full((1, 2), NO_ANSWER)})
    some = problem_values({"correct": correct, "answers": np.array([[0, NO_ANSWER]])})
    assert "majority_accuracy@2" in some and not omissions([{"metrics": some}])
    assert not any(name.startswith(("majority", "answer")) for name in without)
    assert "no response has an answer" in omissions([{"metrics": without}])
