"""How much a mean would vary if the benchmark held other problems of its kind, or other training seeds were drawn."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr, stdtrit  # the normal distribution; quantiles of Student's


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
    # Only how often each problem is drawn matters, so the resampled means are one matrix product.
    uniform = np.full(num_problems, 1 / num_problems)
    counts = np.random.default_rng(seed).multinomial(num_problems, uniform, size=num_resamples)
    means = np.sort(counts / num_problems @ table, axis=0)

    centred = table - table.mean(axis=0)
    deviation = np.maximum(np.sqrt(np.mean(centred**2, axis=0)), np.finfo(np.float64).tiny)
    acceleration = np.mean((centred / deviation) ** 3, axis=0) / (6 * np.sqrt(num_problems))

    widest = stdtrit(num_problems - 1, (1 + level) / 2) * np.sqrt(num_problems / (num_problems - 1))
    ends = []
    for z in (-widest, widest):
        shifted = acceleration + z
        # The denominator is not positive only for a handful of problems and a level near 1: the end is then the
        # outermost resample.
        corrected = acceleration + shifted / np.maximum(1 - acceleration * shifted, np.finfo(np.float64).eps)
        rows = np.rint(ndtr(corrected) * (num_resamples - 1)).astype(int)
        ends.append(means[rows, np.arange(means.shape[1])].reshape(metrics))
    return ends[0], ends[1]


class Interval(NamedTuple):
    """A mean over seeds and its 95% bounds, both NaN where there is a single seed."""

    mean: float
    low: float
    high: float


def mean_interval(values: Float[np.ndarray, " seeds"]) -> Interval:
    """Student's interval of the mean: exact if runs with other seeds are normally distributed around it.

    With two seeds it is 9 standard deviations wide to each side: that is how little two seeds say.

    Raises:
      ValueError: there is no value, or one that is not finite.
    """
    if not len(values) or not np.all(np.isfinite(values)):
        raise ValueError("A mean over seeds needs a finite value of each.")
    mean, degrees = float(values.mean()), len(values) - 1
    if not degrees:
        return Interval(mean, float("nan"), float("nan"))
    half = float(stdtrit(degrees, 0.975)) * float(values.std(ddof=1)) / len(values) ** 0.5
    return Interval(mean, mean - half, mean + half)


def paired_difference(values: dict[int, float], baseline: dict[int, float]) -> tuple[Interval | None, int]:
    """Mean difference from the baseline over the seeds that both have (None if there are none), and their number.

    Runs with the same seed see the same prompts in the same order, so what a seed does to both of them cancels.
    """
    shared = sorted(values.keys() & baseline.keys())
    if not shared:
        return None, 0
    return mean_interval(np.array([values[seed] - baseline[seed] for seed in shared])), len(shared)
