"""The entropy of answers, against values computed by hand."""

import math

import numpy as np

from poly_epo_jax.metrics.majority import answer_entropy


def test_entropy_of_hand_made_answers():
    answers = np.array([[7, 7, 7, 7], [0, 1, 2, 3], [5, 5, 9, 9], [1, 1, 1, 2], [-1, -1, -1, -1], [-1, 0, -1, 0]])
    quarter = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    expected = [0, math.log(4), math.log(2), quarter, 0, math.log(2)]
    np.testing.assert_allclose(answer_entropy(answers), expected, atol=1e-12)


def test_neither_the_order_nor_the_names_of_answers_matter():
    rng = np.random.default_rng(0)
    answers = rng.integers(0, 5, (20, 9))
    renamed = rng.permutation(5)[rng.permuted(answers, axis=1)]
    np.testing.assert_allclose(answer_entropy(renamed), answer_entropy(answers), atol=1e-12)
    assert len(set(answer_entropy(answers).round(9))) > 3
