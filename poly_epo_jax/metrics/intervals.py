"""Confidence intervals of means over the problems of a benchmark and over training seeds."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr, stdtrit  # normal distribution function; quantiles of Student's t


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
    The coverage of the studentized bootstrap is higher if nearly all values are equal, but its bounds can be infinite.

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
    if num_problems < 2:
        raise ValueError(f"An interval over problems requires at least two problems, but there are {num_problems}.")
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie between 0 and 1.")
    if not np.all(np.isfinite(values)):
        raise ValueError("values must be finite; remove missing values.")
    table = values.reshape(num_problems, -1).astype(np.float64)
    # A resampled mean depends only on how often each problem is drawn, so one matrix product computes all means.
    uniform = np.full(num_problems, 1 / num_problems)
    counts = np.random.default_rng(seed).multinomial(num_problems, uniform, size=num_resamples)
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


class Interval(NamedTuple):
    """A mean with the bounds of its 95% confidence interval.

    Attributes:
      mean: The mean.
      low: Lower bound, NaN if there is a single value.
      high: Upper bound, NaN if there is a single value.
    """

    mean: float
    low: float
    high: float


def mean_interval(values: Float[np.ndarray, " seeds"]) -> Interval:
    """Computes Student's confidence interval of the mean over seeds.

    The interval is exact if the values of different seeds are normally distributed. With two seeds, it extends 9
    standard deviations to each side.

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


def paired_difference(values: dict[int, float], baseline: dict[int, float]) -> tuple[Interval | None, int]:
    """Computes the mean difference from a baseline over the seeds that both have.

    Runs with the same seed train on the same prompts in the same order, so the effect of a seed on both runs cancels.

    Args:
      values: Values by seed.
      baseline: Values of the baseline by seed.

    Returns:
      The mean difference with its interval, or None if there are no common seeds, and the number of common seeds.
    """
    shared = sorted(values.keys() & baseline.keys())
    if not shared:
        return None, 0
    return mean_interval(np.array([values[seed] - baseline[seed] for seed in shared])), len(shared)
