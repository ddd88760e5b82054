"""Tests of means over seeds: coverage of the intervals, and paired differences."""

import numpy as np
import pytest

from poly_epo_jax.metrics.intervals import Interval, mean_interval, paired_difference


def test_intervals_by_hand():
    mean, low, high = mean_interval(np.array([1.0, 2.0, 3.0]))
    assert mean == 2.0
    assert (low, high) == pytest.approx((2.0 - 4.302653 / 3**0.5, 2.0 + 4.302653 / 3**0.5))
    assert mean_interval(np.array([0.5, 0.5])) == Interval(0.5, 0.5, 0.5)


# 97.5% quantiles of Student's t as in statistical tables, with 1, 2, 5 and 9 degrees of freedom.
@pytest.mark.parametrize(("num_seeds", "quantile"), [(2, 12.706), (3, 4.303), (6, 2.571), (10, 2.262)])
def test_half_widths_are_tabulated_quantiles(num_seeds: int, quantile: float):
    values = np.random.default_rng(num_seeds).normal(3.0, 2.0, num_seeds)
    mean, low, high = mean_interval(values)
    standard_error = values.std(ddof=1) / num_seeds**0.5
    assert (high - mean) / standard_error == pytest.approx(quantile, abs=5e-4)
    assert (mean - low) / standard_error == pytest.approx(quantile, abs=5e-4)


@pytest.mark.parametrize("num_seeds", [2, 3, 5, 6, 10])
def test_intervals_cover_95_percent(num_seeds: int):
    rng = np.random.default_rng(num_seeds)
    intervals = [mean_interval(rng.normal(3.0, 2.0, num_seeds)) for _ in range(10_000)]
    assert np.mean([low <= 3.0 <= high for _, low, high in intervals]) == pytest.approx(0.95, abs=0.007)


def test_a_single_seed_has_no_interval():
    mean, low, high = mean_interval(np.array([0.25]))
    assert mean == 0.25 and np.isnan(low) and np.isnan(high)
    for values in ([], [1.0, np.nan]):
        with pytest.raises(ValueError, match="finite value"):
            mean_interval(np.array(values))


def test_differences_are_paired_by_seed():
    """The effect of a seed on both methods does not widen the interval."""
    baseline = {0: 1.0, 1: 5.0, 2: 9.0, 3: 0.0}
    assert paired_difference({0: 1.5, 1: 5.5, 2: 9.5, 7: 100.0}, baseline) == Interval(0.5, 0.5, 0.5)
    assert paired_difference({7: 1.0}, baseline) is None
