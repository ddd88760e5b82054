"""Tests of the agreement of clusterings: values computed by hand, and the definitions over all pairs of responses."""

import itertools
import math

import numpy as np
import pytest

from poly_epo_jax.metrics.agreement import adjusted_rand_index, degenerate_as_singletons, v_measure
from poly_epo_jax.types import DEGENERATE_CLUSTER


@pytest.mark.parametrize(
    ("first", "second", "rand", "v"),
    [
        # Of 6 pairs, 2 and 1 are joined, 1 by both: (1 - 2/6) / (3/2 - 2/6). Entropies log 2, 1.5 log 2, 1.5 log 2.
        ([0, 0, 1, 1], [0, 0, 1, 2], 4 / 7, 4 / 5),
        # 2 and 2 pairs are joined, 0 by both: (0 - 4/6) / (2 - 4/6). Their mutual information is 0.
        ([0, 0, 1, 1], [0, 1, 0, 1], -1 / 2, 0),
        # Of 15 pairs, 6 and 3, 2 by both: (2 - 18/15) / (9/2 - 18/15). Entropies log 2, log 3, log 3 + log(2) / 3.
        ([0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2], 8 / 33, 4 / 3 * math.log(2) / math.log(6)),
    ],
)
def test_values_equal_those_computed_by_hand(first: list[int], second: list[int], rand: float, v: float):
    for pair in (np.array(first), np.array(second)), (np.array(second), np.array(first)):
        assert adjusted_rand_index(*pair) == pytest.approx(rand, abs=1e-12)
        assert v_measure(*pair) == pytest.approx(v, abs=1e-12)


def brute_force_adjusted_rand_index(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the adjusted Rand index, with the expected Rand index computed over all permutations of `second`."""
    pairs = list(itertools.combinations(range(len(first)), 2))

    def joins(ids: np.ndarray) -> np.ndarray:
        return np.array([ids[i] == ids[j] for i, j in pairs])

    def rand(other: np.ndarray) -> float:
        return float(np.mean(joins(first) == joins(other)))

    expected = float(np.mean([rand(np.array(other)) for other in itertools.permutations(second)]))
    # The maximum assumes that both clusterings join the mean number of pairs, and no other pairs.
    in_both = (joins(first).mean() + joins(second).mean()) / 2
    maximum = 1 + 2 * in_both - joins(first).mean() - joins(second).mean()
    return (rand(second) - expected) / (maximum - expected) if maximum > expected else 1.0


def test_the_index_is_adjusted_by_the_expectation_over_all_permutations():
    rng = np.random.default_rng(0)
    for _ in range(20):
        first, second = rng.integers(0, 3, 6), rng.integers(0, 4, 6)
        assert adjusted_rand_index(first, second) == pytest.approx(brute_force_adjusted_rand_index(first, second))


def test_equal_clusterings_have_agreement_1_regardless_of_their_ids():
    for ids in ([0, 0, 0], [0, 1, 2], [7, 7, 3, 100], [5]):
        renamed = np.array([{0: 9, 1: 8, 2: 7, 7: 1, 3: 0, 100: 2, 5: 5}[label] for label in ids])
        assert adjusted_rand_index(np.array(ids), renamed) == 1
        assert v_measure(np.array(ids), renamed) == pytest.approx(1)


def test_one_cluster_and_all_clusters_do_not_agree():
    assert adjusted_rand_index(np.zeros(4, int), np.arange(4)) == 0 == v_measure(np.zeros(4, int), np.arange(4))


def test_degenerate_responses_share_no_cluster():
    ids = np.array([DEGENERATE_CLUSTER, 0, DEGENERATE_CLUSTER, 0, 101, 5])
    singletons = degenerate_as_singletons(ids)
    assert len({*singletons.tolist()}) == 5 and singletons[1] == singletons[3]
    assert singletons[[1, 4, 5]].tolist() == [0, 101, 5]
