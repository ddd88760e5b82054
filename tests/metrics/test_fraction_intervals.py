"""Tests of intervals of fractions: Clopper-Pearson at 0 and 1, coverage of at least the level, and smooth curves."""

import numpy as np
import pytest
from scipy.special import betaincinv

from poly_epo_jax.metrics.intervals import fraction_interval
from poly_epo_jax.metrics.pass_at_k import pass_at_k


def clopper_pearson(num_ones: int, num_problems: int, level: float = 0.95) -> tuple[float, float]:
    tail, zeros = (1 - level) / 2, num_problems - num_ones
    low = float(betaincinv(num_ones, zeros + 1, tail)) if num_ones else 0.0
    return low, float(betaincinv(num_ones + 1, zeros, 1 - tail)) if zeros else 1.0


@pytest.mark.parametrize(("num_ones", "num_problems"), [(0, 60), (60, 60), (58, 60), (1, 2), (15, 30), (1, 500)])
def test_values_of_0_and_1_give_clopper_pearson(num_ones: int, num_problems: int):
    values = np.repeat([1.0, 0.0], [num_ones, num_problems - num_ones])
    bounds = fraction_interval(values, num_resamples=40_000)
    expected = np.array(clopper_pearson(num_ones, num_problems))
    # Four standard deviations of a quantile of 40,000 normal values are 0.053 standard deviations of the values.
    np.testing.assert_allclose(bounds, expected, atol=0.053 * np.ptp(expected) / 3.92 + 1e-12)


def test_equal_values_of_60_problems_leave_6_percent():
    """0.025^(1/60) = 0.9404: with a smaller success rate, 60 solved problems have a probability below 2.5%."""
    ones, zeros = (fraction_interval(np.full(60, value)) for value in (1.0, 0.0))
    assert ones == (pytest.approx(0.9404, abs=0.004), pytest.approx(1.0))
    assert zeros == (0.0, pytest.approx(1 - 0.9404, abs=0.004))


@pytest.mark.parametrize(
    ("num_problems", "rate"), [(60, 0.97), (60, 0.99), (60, 0.5), (30, 0.025), (30, 0.95), (10, 0.8), (100, 0.999)]
)
def test_the_coverage_of_0_and_1_is_at_least_the_level(num_problems: int, rate: float):
    """The probability of each number of solved problems is exact, so the result has no sampling error."""
    counts = np.arange(num_problems + 1)
    low, high = fraction_interval((np.arange(num_problems)[:, None] < counts).astype(float), num_resamples=10_000)
    with np.errstate(divide="ignore"):
        logs = np.cumsum(np.log(np.arange(num_problems, 0, -1) / np.arange(1, num_problems + 1)))
    probability = np.exp(
        np.concatenate([[0.0], logs]) + counts * np.log(rate) + (num_problems - counts) * np.log1p(-rate)
    )
    assert probability.sum() == pytest.approx(1)
    assert probability[(low <= rate) & (rate <= high)].sum() >= 0.95


@pytest.mark.parametrize("k", [1, 8, 15, 16])
@pytest.mark.parametrize("num_problems", [10, 30, 60])
def test_the_coverage_of_pass_at_k_is_at_least_the_level(num_problems: int, k: int):
    """3% of the problems are never solved, and the success rates p of the others have the density 5 p^4."""
    rng = np.random.default_rng(k)
    rates = rng.beta(5, 1, (num_problems, 1000)) * (rng.random((num_problems, 1000)) > 0.03)
    num_correct = rng.binomial(16, rates)
    low, high = fraction_interval(pass_at_k(16, num_correct.ravel(), k).reshape(num_correct.shape))
    all_fail = np.prod([i / (5 + i) for i in range(1, k + 1)])  # E[(1 - p)^k]
    truth = 0.97 * (1 - all_fail)
    assert np.mean((low <= truth) & (truth <= high)) >= 0.95 - 3 * (0.95 * 0.05 / 1000) ** 0.5


def test_a_curve_of_pass_at_k_has_no_kink_at_the_largest_k():
    """At k = 16, all 60 values are 1. At k = 15, one of them is 15/16, and the interval is nearly the same."""
    num_correct = np.repeat([1, 16], [1, 59])
    low, high = fraction_interval(np.stack([pass_at_k(16, num_correct, k) for k in range(1, 17)], axis=1))
    steps = np.diff(low)
    assert np.all(steps >= 0) and np.all(high >= high[0])
    assert steps[-1] == pytest.approx(steps[-2], abs=2e-3) and low[-1] - low[-2] < 0.003
    assert np.all((high - low > 0.04) & (high - low < 0.1))


def test_bounds_are_mirrored_and_shared_by_metrics():
    values = np.random.default_rng(0).random((40, 3, 2)) ** 3
    low, high = fraction_interval(values)
    assert low.shape == high.shape == (3, 2)
    np.testing.assert_allclose(fraction_interval(1 - values), [1 - high, 1 - low], atol=1e-12)
    np.testing.assert_allclose(fraction_interval(values[:, 1, 1]), [low[1, 1], high[1, 1]], atol=1e-12)
    assert np.all((low > 0) & (low < values.mean(axis=0)) & (values.mean(axis=0) < high) & (high < 1))
    np.testing.assert_allclose(
        fraction_interval(1.5 * values - 0.5, bounds=(-0.5, 1.0)), [1.5 * low - 0.5, 1.5 * high - 0.5], atol=1e-12
    )
    narrow, wide = fraction_interval(values, 0.8), fraction_interval(values, 0.99)
    assert np.all((wide[0] < narrow[0]) & (narrow[1] < wide[1]))


@pytest.mark.parametrize(
    ("values", "level", "complaint"),
    [
        (np.array([0.5]), 0.95, "at least two problems.* 1"),
        (np.array([0.5, 1.0]), 0.0, "level=0.0"),
        (np.array([0.5, np.inf]), 0.95, "values .* finite"),
        (np.array([0.5, 1.5]), 0.95, "between 0 and 1"),
        (np.array([-0.1, 1.0]), 0.95, "between 0 and 1"),
    ],
)
def test_invalid_arguments_are_rejected(values: np.ndarray, level: float, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        fraction_interval(values, level)


def test_rounding_errors_are_accepted():
    low, high = fraction_interval(np.array([-1e-12, 1 + 1e-12, 1.0]))
    assert 0 <= low < high <= 1
