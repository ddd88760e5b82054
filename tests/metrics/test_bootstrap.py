"""The interval contains the truth as often as it says, even for few problems of which most are never solved."""

import math

import numpy as np
import pytest

from poly_epo_jax.metrics.intervals import bootstrap_interval


def missed(num_problems: int, alpha: float, beta: float, num_benchmarks: int) -> tuple[float, float]:
    """Shares of benchmarks whose interval of level 0.95 lies above the truth, and below it.

    Each metric is a benchmark of its own, of problems that a policy solves in p ~ Beta(alpha, beta) of 16 generations.
    """
    rng = np.random.default_rng(num_problems)
    solve_rates = rng.beta(alpha, beta, (num_problems, num_benchmarks))
    low, high = bootstrap_interval(rng.binomial(16, solve_rates) / 16)
    truth = alpha / (alpha + beta)
    return float(np.mean(low > truth)), float(np.mean(high < truth))


# Plain quantiles hold the truth in 91% of the second case, 93% of the third; without the wider spread, the first fails.
@pytest.mark.parametrize(
    ("num_problems", "alpha", "beta"),
    [(10, 5, 2), (30, 0.2, 1.8), (30, 5, 2), (60, 1, 1), (100, 0.2, 1.8), (200, 0.5, 0.5)],
)
def test_the_interval_covers_the_truth(num_problems, alpha, beta):
    covered = 1 - sum(missed(num_problems, alpha, beta, num_benchmarks=2000))
    # The number of covered benchmarks is binomial: three and a half of its standard deviations are 0.017.
    assert abs(covered - 0.95) < 3.5 * math.sqrt(0.95 * 0.05 / 2000)


@pytest.mark.parametrize("alpha", [0.2, 1.8])
def test_skewed_values_are_missed_on_both_sides_alike(alpha):
    """Plain quantiles are too low for a hard benchmark, too high for an easy one: they miss 1.4% and 4.5%."""
    for share in missed(100, alpha, 2 - alpha, num_benchmarks=4000):
        assert abs(share - 0.025) < 3.5 * math.sqrt(0.025 * 0.975 / 4000)


def test_metrics_are_resampled_as_if_alone():
    values = np.random.default_rng(0).random((40, 3, 2)) ** 3
    low, high = bootstrap_interval(values, seed=5)
    assert low.shape == high.shape == (3, 2)
    for metric in np.ndindex(3, 2):
        alone = bootstrap_interval(values[:, *metric], seed=5)
        np.testing.assert_allclose([low[metric], high[metric]], alone, atol=1e-12)


def test_the_interval_moves_with_the_unit_and_the_order_of_better():
    values = np.random.default_rng(1).random((30, 4)) ** 4
    low, high = bootstrap_interval(values)
    assert np.all((values.min(axis=0) < low) & (low < values.mean(axis=0)))
    assert np.all((values.mean(axis=0) < high) & (high < values.max(axis=0)))
    np.testing.assert_allclose(bootstrap_interval(3 * values + 2), [3 * low + 2, 3 * high + 2], atol=1e-12)
    np.testing.assert_allclose(bootstrap_interval(-values), [-high, -low], atol=1e-12)
    # The long tail is on the upper side, so the interval reaches farther up than down.
    assert np.all(high - values.mean(axis=0) > values.mean(axis=0) - low)


def test_a_higher_level_is_wider_and_a_seed_repeats():
    values = np.random.default_rng(2).random(30)
    narrow, wide = bootstrap_interval(values, 0.8), bootstrap_interval(values, 0.99)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    first, again, other = (bootstrap_interval(values, seed=seed) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0])
def test_equal_values_leave_no_doubt(value):
    np.testing.assert_allclose(bootstrap_interval(np.full(30, value)), [value, value], atol=1e-12)


@pytest.mark.parametrize("num_problems", [2, 3, 4])
def test_a_handful_of_problems_gives_nearly_their_range(num_problems):
    values = np.array([0.0, 0.0, 0.0, 1.0])[-num_problems:]
    low, high = bootstrap_interval(values, 0.999)
    assert low == 0 and high == 1


@pytest.mark.parametrize(
    ("values", "level", "complaint"),
    [
        (np.array([0.5]), 0.95, "at least two problems, not 1"),
        (np.array([0.5, 1.0]), 1.0, "level is 1.0, but must lie between 0 and 1"),
        (np.array([0.5, np.nan]), 0.95, "values must be finite"),
    ],
)
def test_what_has_no_interval_is_refused(values, level, complaint):
    with pytest.raises(ValueError, match=complaint):
        bootstrap_interval(values, level)
