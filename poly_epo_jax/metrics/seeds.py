"""How much a mean over training seeds would vary if other seeds had been drawn."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from poly_epo_jax.metrics.bootstrap import student_quantile

_FEW = (12.706, 4.303, 3.182, 2.776)
"""Student's 97.5% quantiles for 1 to 4 degrees of freedom, where `student_quantile` is off by 3% and more."""


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
    quantile = _FEW[degrees - 1] if degrees <= len(_FEW) else student_quantile(0.975, degrees)
    half = quantile * float(values.std(ddof=1)) / len(values) ** 0.5
    return Interval(mean, mean - half, mean + half)


def paired_difference(values: dict[int, float], baseline: dict[int, float]) -> tuple[Interval | None, int]:
    """Mean difference from the baseline over the seeds that both have (None if there are none), and their number.

    Runs with the same seed see the same prompts in the same order, so what a seed does to both of them cancels.
    """
    shared = sorted(values.keys() & baseline.keys())
    if not shared:
        return None, 0
    return mean_interval(np.array([values[seed] - baseline[seed] for seed in shared])), len(shared)
