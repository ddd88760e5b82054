"""Means over seeds: intervals that contain the truth as often as they say, and differences seed by seed."""

import numpy as np
import pytest

from poly_epo_jax.metrics.intervals import Interval, mean_interval, paired_difference


def test_by_hand():
    mean, low, high = mean_interval(np.array([1.0, 2.0, 3.0]))
    assert mean == 2.0
    assert (low, high) == pytest.approx((2.0 - 4.302653 / 3**0.5, 2.0 + 4.302653 / 3**0.5))
    assert mean_interval(np.array([0.5, 0.5])) == Interval(0.5, 0.5, 0.5)


@pytest.mark.parametrize("num_seeds", [2, 3, 5, 6, 10])
def test_intervals_hold_the_truth_95_percent_of_the_time(num_seeds: int):
    rng = np.random.default_rng(num_seeds)
    intervals = [mean_interval(rng.normal(3.0, 2.0, num_seeds)) for _ in range(10_000)]
    assert np.mean([low <= 3.0 <= high for _, low, high in intervals]) == pytest.approx(0.95, abs=0.007)


def test_one_seed_says_nothing_of_how_seeds_differ():
    mean, low, high = mean_interval(np.array([0.25]))
    assert mean == 0.25 and np.isnan(low) and np.isnan(high)
    for values in ([], [1.0, np.nan]):
        with pytest.raises(ValueError, match="needs a finite value of each"):
            mean_interval(np.array(values))


def test_differences_are_taken_seed_by_seed():
    """Seeds that move both methods alike do not widen the interval."""
    baseline = {0: 1.0, 1: 5.0, 2: 9.0, 3: 0.0}
    interval, shared = paired_difference({0: 1.5, 1: 5.5, 2: 9.5, 7: 100.0}, baseline)
    assert interval == Interval(0.5, 0.5, 0.5) and shared == 3
    assert paired_difference({7: 1.0}, baseline) == (None, 0)
