"""Tests of intervals of paired differences: coverage and width where few differences or all are 0."""

import numpy as np
import pytest
from scipy.special import expit, logit

from poly_epo_jax.metrics.intervals import bootstrap_interval, difference_interval, fraction_interval, interval_text
from poly_epo_jax.metrics.pass_at_k import pass_at_k

NUM_RUNS = 1000


def differences(num_problems: int, k: int, size: int = NUM_RUNS) -> np.ndarray:
    """Returns differences in pass@k of 16 responses, for Beta(0.5, 0.5) rates that rise by 0.5 in the logit."""
    rng = np.random.default_rng(num_problems)
    rates = rng.beta(0.5, 0.5, (num_problems, size))
    correct = [rng.binomial(16, chance) for chance in (rates, expit(logit(rates) + 0.5))]
    before, after = (pass_at_k(16, counts.ravel(), k).reshape(counts.shape) for counts in correct)
    return after - before


@pytest.mark.parametrize(("num_problems", "k"), [(20, 16), (60, 16), (200, 4)])
def test_differences_of_pass_at_k_are_covered(num_problems: int, k: int):
    """The bootstrap without additional problems covers 62% and 88% in the first two cases."""
    values = differences(num_problems, k)
    low, high = difference_interval(values)
    truth = differences(200_000, k, 1).mean()
    assert np.mean((low <= truth) & (truth <= high)) >= 0.93
    assert np.all((low < values.mean(axis=0)) & (values.mean(axis=0) < high))
    assert np.all(np.round(low, 3) < np.round(high, 3))  # no interval is printed as [0.000, 0.000]


@pytest.mark.parametrize("gained", [0.05, 0.3])
def test_problems_that_only_one_model_solves_are_covered(gained: float):
    """Differences of deterministic models are 0 or 1, also at k = 1."""
    values = (np.random.default_rng(0).random((20, NUM_RUNS)) < gained).astype(float)
    low, high = difference_interval(values)
    assert np.mean((low <= gained) & (gained <= high)) >= 0.93


def test_small_differences_of_many_problems_have_the_width_of_the_bootstrap():
    """At k = 1, most differences are far from 1, and the intervals of both are almost equal."""
    values = differences(200, 1, 100)
    width, before = (
        np.subtract(*interval(values)[::-1]).mean() for interval in (difference_interval, bootstrap_interval)
    )
    assert before < width < 1.05 * before


def test_equal_models_of_20_problems_leave_13_percent():
    """Two additional differences, +1 and -1: Student's interval is 2.08 * sqrt(2 / 22 / 21) = 0.137."""
    low, high = difference_interval(np.zeros((20, 2, 3)))
    assert low.shape == high.shape == (2, 3)
    assert np.all(np.abs([-low, high] - np.array(0.137)) < 0.003 + 0.5 / 22)  # resampled means are multiples of 1/22
    assert np.all(high < 2 * fraction_interval(np.full(20, 0.5))[1] - 1)


def test_differences_beyond_1_are_rejected():
    with pytest.raises(ValueError, match="between -1 and 1"):
        difference_interval(np.array([0.5, -1.5]))


def test_intervals_of_zero_width_are_not_written():
    estimate = {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert interval_text(estimate) == "0.000"
    assert interval_text(estimate | {"high": 0.01}, sign="+") == "+0.000 [+0.000, +0.010]"
