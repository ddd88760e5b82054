"""How much a mean over problems would vary if the benchmark held other problems of its kind."""

from statistics import NormalDist

import numpy as np
from jaxtyping import Float

_NORMAL = NormalDist()
_COUNTS_AT_ONCE = 2**22
"""Limits the memory that is used at once to tens of megabytes, for any number of problems."""


def bootstrap_interval(
    values: Float[np.ndarray, " problems *metrics"], level: float = 0.95, num_resamples: int = 2000, seed: int = 0
) -> tuple[Float[np.ndarray, "*metrics"], Float[np.ndarray, "*metrics"]]:
    """Confidence interval (low, high), in the values' unit, of each metric's mean over problems.

    Problems are drawn with replacement, the same ones for all metrics, and quantiles of the resampled means are
    taken. Plain quantiles at (1 -+ level) / 2 cover the truth too rarely for few problems, for two reasons, each with
    a correction of the quantiles' levels, so that the interval stays finite and within the values' range:
      the resampled means spread too little, so z = Phi^-1((1 +- level) / 2) becomes z = +- t_{P-1} sqrt(P / (P - 1))
        for P problems (the expanded percentile interval: Hesterberg 2015, What Teachers Should Know about the
        Bootstrap, section 4.2), with t the quantile of Student's distribution;
      values are skewed (a hard benchmark is mostly zeros), so the level becomes Phi(a + (a + z) / (1 - a (a + z)))
        with a = skewness / (6 sqrt(P)) (BCa: Efron 1987, Better Bootstrap Confidence Intervals; for a mean its bias
        correction equals its acceleration a to this order, and needs no second estimate).
    The studentized bootstrap covers still better when nearly all values are equal, but its ends then run to infinity.

    Only the choice of problems is resampled. The error of a problem's own value, which comes from finitely many
    generations, is part of the spread between problems, and so is counted.

    Args:
      values: a number for each problem and metric, say pass@k for each k.
      level: share of benchmarks whose interval should hold the truth, between 0 and 1.
      num_resamples: how many benchmarks are drawn.
      seed: equal seeds give equal intervals.

    Raises:
      ValueError: for fewer than two problems, a level outside (0, 1), or values that are not finite.
    """
    num_problems, metrics = values.shape[0], values.shape[1:]
    if num_problems < 2:
        raise ValueError(f"An interval over problems needs at least two problems, not {num_problems}.")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}, but must lie between 0 and 1.")
    if not np.all(np.isfinite(values)):
        raise ValueError("values must be finite; leave out what was not measured.")
    table = values.reshape(num_problems, -1).astype(np.float64)
    means = _resampled_means(table, num_resamples, np.random.default_rng(seed))
    means.sort(axis=0)

    centred = table - table.mean(axis=0)
    deviation = np.maximum(np.sqrt(np.mean(centred**2, axis=0)), np.finfo(np.float64).tiny)
    acceleration = np.mean((centred / deviation) ** 3, axis=0) / (6 * np.sqrt(num_problems))

    widest = student_quantile((1 + level) / 2, num_problems - 1) * np.sqrt(num_problems / (num_problems - 1))
    ends = []
    for z in (-widest, widest):
        shifted = acceleration + z
        # The denominator is not positive only for a handful of problems and a level near 1: the end is then the
        # outermost resample.
        corrected = acceleration + shifted / np.maximum(1 - acceleration * shifted, np.finfo(np.float64).eps)
        quantiles = np.array([_NORMAL.cdf(x) for x in corrected])
        rows = np.rint(quantiles * (num_resamples - 1)).astype(int)
        ends.append(means[rows, np.arange(means.shape[1])].reshape(metrics))
    return ends[0], ends[1]


def _resampled_means(
    values: Float[np.ndarray, "problems metrics"], num_resamples: int, rng: np.random.Generator
) -> Float[np.ndarray, "resamples metrics"]:
    """Only how often each problem is drawn matters, so the resampled means are one matrix product."""
    num_problems, num_metrics = values.shape
    uniform = np.full(num_problems, 1 / num_problems)
    at_once = max(1, _COUNTS_AT_ONCE // num_problems)
    means = np.empty((num_resamples, num_metrics))
    for start in range(0, num_resamples, at_once):
        stop = min(start + at_once, num_resamples)
        counts = rng.multinomial(num_problems, uniform, size=stop - start)
        np.matmul(counts / num_problems, values, out=means[start:stop])
    return means


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t from the normal one (Cornish and Fisher 1938; Abramowitz and Stegun 26.7.5).

    It is within 1% from 5 degrees of freedom on for levels up to 0.99; with fewer, the interval spans nearly all
    resamples either way.
    """
    z = _NORMAL.inv_cdf(probability)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
