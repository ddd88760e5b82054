"""Confidence intervals of means over the problems of a benchmark and over training seeds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr, stdtrit  # normal distribution function; quantiles of Student's t

ROUNDING = 1e-9
"""Maximum distance from [0, 1] of a fraction, for rounding errors."""


def bootstrap_interval(
    values: Float[np.ndarray, " problems *metrics"], level: float = 0.95, num_resamples: int = 2000, seed: int = 0
) -> tuple[Float[np.ndarray, "*metrics"], Float[np.ndarray, "*metrics"]]:
    """Computes bootstrap confidence intervals of the mean over problems.

    Problems are resampled with replacement, with the same resamples for all metrics. The bounds are quantiles of the
    resampled means, so they are finite and within the range of the values. For few problems, the coverage of the
    quantiles at (1 -+ level) / 2 is too low. Two corrections adjust their levels:
      The spread of the resampled means is too small. Therefore z = Phi^-1((1 +- level) / 2) is replaced by
        z = +- t_{P-1} sqrt(P / (P - 1)) for P problems, with t the quantile of Student's distribution (expanded
        percentile interval: Hesterberg 2015, What Teachers Should Know about the Bootstrap, section 4.2).
      Values are skewed (the values of a difficult benchmark are mostly 0). Therefore the level is
        Phi(a + (a + z) / (1 - a (a + z))) with a = skewness / (6 sqrt(P)) (BCa: Efron 1987, Better Bootstrap Confidence
        Intervals; to this order, the bias correction of a mean equals its acceleration a).
    The interval has zero width if all values are equal. `fraction_interval` and `difference_interval` do not, but they
    require values in [0, 1] and [-1, 1].

    Only the problems are resampled. The sampling error of a problem's value, which is estimated from a finite number of
    generations, is included because it contributes to the variance between problems.

    Args:
      values: One value per problem and metric, such as pass@k for several k.
      level: Confidence level, between 0 and 1.
      num_resamples: Number of resamples.
      seed: Seed of the resamples.

    Returns:
      Lower and upper bounds, in the unit of the values.

    Raises:
      ValueError: If there are fewer than two problems, if `level` is not between 0 and 1, or if a value is not finite.
    """
    num_problems, metrics = values.shape[0], values.shape[1:]
    table = _checked_table(values, level)
    # A resampled mean depends only on how often each problem is drawn, so one matrix product computes all means.
    counts = np.random.default_rng(seed).multinomial(
        num_problems, np.full(num_problems, 1 / num_problems), size=num_resamples
    )
    means = np.sort(counts / num_problems @ table, axis=0)

    centered = table - table.mean(axis=0)
    deviation = np.maximum(np.sqrt(np.mean(centered**2, axis=0)), np.finfo(np.float64).tiny)
    acceleration = np.mean((centered / deviation) ** 3, axis=0) / (6 * np.sqrt(num_problems))

    max_z = stdtrit(num_problems - 1, (1 + level) / 2) * np.sqrt(num_problems / (num_problems - 1))
    ends = []
    for z in (-max_z, max_z):
        shifted = acceleration + z
        # For very few problems and a level near 1, the denominator may not be positive. The bound is then the most
        # extreme resample.
        corrected = acceleration + shifted / np.maximum(1 - acceleration * shifted, np.finfo(np.float64).eps)
        rows = np.rint(ndtr(corrected) * (num_resamples - 1)).astype(int)
        ends.append(means[rows, np.arange(means.shape[1])].reshape(metrics))
    return ends[0], ends[1]


def fraction_interval(
    values: Float[np.ndarray, " problems *metrics"],
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> tuple[Float[np.ndarray, "*metrics"], Float[np.ndarray, "*metrics"]]:
    """Computes confidence intervals of the mean over problems for values in [0, 1] or another range.

    The upper bound is the (1 + level) / 2 quantile of the weighted mean of the values and one additional value 1, with
    weights from the uniform distribution over all non-negative weights with sum 1. The lower bound is the
    (1 - level) / 2 quantile with an additional value 0. Learned-Miller and Thomas (2019, arXiv:1905.06208) conjecture
    that the coverage is never below the level. If all values are 0 or 1, the bounds are those of Clopper and Pearson,
    up to the error of the random weights. The bounds are continuous in the values, and differ even if all values are
    equal. Values in another range are scaled to [0, 1]. As in `bootstrap_interval`, only the variation between problems
    is estimated.

    Args:
      values: One value per problem and metric, such as pass@k for several k.
      level: Confidence level, between 0 and 1.
      num_resamples: Number of random weightings, with the same weightings for all metrics.
      seed: Seed of the weightings.
      bounds: Smallest and largest possible value.

    Returns:
      Lower and upper bounds.

    Raises:
      ValueError: If there are fewer than two problems, if `level` is not between 0 and 1, or if a value is outside
        the bounds.
    """
    num_problems, metrics = values.shape[0], values.shape[1:]
    smallest, largest = bounds
    table = (_checked_table(values, level) - smallest) / (largest - smallest)
    if np.any(np.abs(table - 0.5) > 0.5 + ROUNDING):
        raise ValueError(f"values must lie between {smallest:g} and {largest:g}; use bootstrap_interval for others.")
    table = table.clip(0, 1)
    weights = np.random.default_rng(seed).standard_exponential((num_resamples, num_problems + 1))
    weights /= weights.sum(axis=1, keepdims=True)
    means, additional = weights[:, :-1] @ table, weights[:, -1:]
    row = round((1 + level) / 2 * (num_resamples - 1))
    ends = np.sort(means, axis=0)[num_resamples - 1 - row], np.sort(means + additional, axis=0)[row]
    low, high = ((smallest + (largest - smallest) * end).reshape(metrics) for end in ends)
    return low, high


def difference_interval(
    values: Float[np.ndarray, " problems *metrics"], level: float = 0.95, num_resamples: int = 2000, seed: int = 0
) -> tuple[Float[np.ndarray, "*metrics"], Float[np.ndarray, "*metrics"]]:
    """Computes confidence intervals of the mean over problems for differences of fractions, which lie in [-1, 1].

    If nearly all differences are 0, a sample can lack the problems that determine the mean. The bounds are therefore
    those of `bootstrap_interval` with two additional problems, whose differences are +h and -h. If the differences are
    -1, 0 or 1, then h = 1, as in the interval of Bonett and Price (2012) for paired proportions. In general,
    h = (sum d^2 + 2) / (sum |d| + 2), with sums over the differences d: the mean size of the differences and of two
    differences of 1, weighted by size. A Poisson number of steps of this size has the mean and the variance of a sum of
    rare differences (Bohm and Zech 2014, arXiv:1309.1287). Intervals of many small differences are therefore hardly
    wider than those of `bootstrap_interval`. The width is positive even if all differences are equal.

    Args:
      values: One difference in [-1, 1] per problem and metric, such as that of pass@k for several k.
      level: Confidence level, between 0 and 1.
      num_resamples: Number of resamples.
      seed: Seed of the resamples.

    Returns:
      Lower and upper bounds.

    Raises:
      ValueError: If there are fewer than two problems, if `level` is not between 0 and 1, or if a difference is not in
        [-1, 1].
    """
    sizes = np.abs(_checked_table(values, level)).reshape(values.shape)
    if np.any(sizes > 1 + ROUNDING):
        raise ValueError("differences must lie between -1 and 1; use bootstrap_interval for other values.")
    step = ((sizes**2).sum(axis=0) + 2) / (sizes.sum(axis=0) + 2)
    return bootstrap_interval(np.concatenate([values, step[None], -step[None]]), level, num_resamples, seed)


def mean_over_problems(
    values: Sequence[Any], bounds: tuple[float, float] | None = None
) -> dict[str, float | int | None] | None:
    """Returns "mean", "low" and "high" (ends of the 95% interval over problems) and "num_problems".

    Returns None without values. The ends are None if there is only one value.

    Args:
      values: One value per problem.
      bounds: Smallest and largest possible value. If None, there are none.
    """
    if not values:
        return None
    table = np.array(values, float)
    low: float | None = None
    high: float | None = None
    if len(table) > 1:
        low, high = map(float, fraction_interval(table, bounds=bounds) if bounds else bootstrap_interval(table))
    return {"mean": float(table.mean()), "low": low, "high": high, "num_problems": len(table)}


def _checked_table(values: Float[np.ndarray, " problems *metrics"], level: float) -> Float[np.ndarray, "problems all"]:
    if len(values) < 2:
        raise ValueError(f"An interval over problems requires at least two problems, but there are {len(values)}.")
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie between 0 and 1.")
    if not np.all(np.isfinite(values)):
        raise ValueError("values must be finite; remove missing values.")
    return values.reshape(len(values), -1).astype(np.float64)


class Interval(NamedTuple):
    """A mean with the bounds of its 95% confidence interval.

    Attributes:
      mean: The mean.
      low: Lower bound. NaN if there is a single value.
      high: Upper bound. NaN if there is a single value.
    """

    mean: float
    low: float
    high: float

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> "Interval":
        """Creates an interval from "mean", "low" and "high" of results.json. Bounds can be missing or None."""
        low, high = value.get("low"), value.get("high")
        return cls(value["mean"], math.nan if low is None else low, math.nan if high is None else high)


def interval_text(interval: Interval | Mapping[str, Any] | None, digits: int = 3, sign: str = "") -> str:
    """Formats a mean with its interval in brackets, if it has one. None is a hyphen.

    Equal values do not show how much others vary, so an interval of zero width is not written.

    Args:
      interval: Mean and bounds, or an entry of results.json.
      digits: Number of decimals.
      sign: "+" writes the sign of positive numbers.
    """
    if interval is None:
        return "-"
    if isinstance(interval, Mapping):
        interval = Interval.read(interval)
    mean, low, high = (format(value, f"{sign}.{digits}f") for value in interval)
    return f"{mean} [{low}, {high}]" if ROUNDING < interval.high - interval.low < math.inf else mean


def mean_interval(values: Float[np.ndarray, " seeds"]) -> Interval:
    """Computes Student's confidence interval of the mean over seeds.

    The interval is exact if the values of different seeds are normally distributed. With two seeds, it extends 9
    standard deviations to each side. It has zero width if all values are equal.

    Args:
      values: One value per seed.

    Returns:
      The mean and its interval.

    Raises:
      ValueError: If there are no values, or a value is not finite.
    """
    if not len(values) or not np.all(np.isfinite(values)):
        raise ValueError("A mean over seeds requires a finite value for each seed.")
    mean, degrees = float(values.mean()), len(values) - 1
    if not degrees:
        return Interval(mean, float("nan"), float("nan"))
    half = float(stdtrit(degrees, 0.975)) * float(values.std(ddof=1)) / len(values) ** 0.5
    return Interval(mean, mean - half, mean + half)


def prediction_interval(
    values: Float[np.ndarray, " seeds"], level: float, min_deviation: float = 0.0
) -> tuple[float, float]:
    """Computes Student's prediction interval for the value of one further seed.

    The interval contains this value with probability `level` if the values of different seeds are normally distributed.

    Args:
      values: One value per seed, for at least two seeds.
      level: Probability, between 0 and 1.
      min_deviation: Smallest standard deviation that is assumed, in the unit of the values.

    Returns:
      Lower and upper bound.
    """
    count = len(values)
    deviation = max(float(values.std(ddof=1)), min_deviation)
    half = float(stdtrit(count - 1, (1 + level) / 2)) * deviation * (1 + 1 / count) ** 0.5
    return float(values.mean()) - half, float(values.mean()) + half


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Interval | None:
    """Computes the mean difference from a baseline over the seeds that both have.

    Runs with the same seed train on the same prompts in the same order, so the effect of a seed on both runs cancels.

    Args:
      values: Values by seed.
      baseline: Values of the baseline by seed.

    Returns:
      The mean difference with its interval, or None if there are no common seeds.
    """
    differences = [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]
    return mean_interval(np.array(differences)) if differences else None
