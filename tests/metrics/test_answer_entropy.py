"""Tests of the entropy of answers against values computed by hand."""

import math

import numpy as np

from poly_epo_jax.metrics.majority import answer_entropy


def test_entropy_by_hand():
    answers = np.array([[7, 7, 7, 7], [0, 1, 2, 3], [5, 5, 9, 9], [1, 1, 1, 2], [-1, -1, -1, -1], [-1, 0, -1, 0]])
    quarter = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    expected = [0, math.log(4), math.log(2), quarter, 0, math.log(2)]
    np.testing.assert_allclose(answer_entropy(answers), expected, atol=1e-12)


def test_entropy_does_not_depend_on_order_and_ids():
    rng = np.random.default_rng(0)
    answers = rng.integers(0, 5, (20, 9))
    renamed = rng.permutation(5)[rng.permuted(answers, axis=1)]
    np.testing.assert_allclose(answer_entropy(renamed), answer_entropy(answers), atol=1e-12)
    assert len(set(answer_entropy(answers).round(9))) > 3
