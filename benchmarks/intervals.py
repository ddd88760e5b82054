"""Measures the coverage of all 95% intervals that the package prints: python benchmarks/intervals.py

A population has one value per problem or training seed. 1,000 samples of each size are drawn from it. For each
interval and size, the table contains the fraction of the samples whose interval contains the mean of the population
(the mean over populations and k, and the lowest with its population and k), the mean width, and the largest fraction of
intervals of zero width. These are not printed by the package, and count as missing the mean. The first interval of a
quantity is the one that the package uses; the others are alternatives.

Populations of pass@k, of its differences and of majority@16 simulate 16 responses to each problem with success rate p,
those of best of k 16 rewards with mean p and a beta distribution, and populations of agreement 8 responses.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import expit, logit, stdtrit

from poly_epo_jax.metrics.agreement import adjusted_rand_index, v_measure
from poly_epo_jax.metrics.intervals import (
    ROUNDING,
    bootstrap_interval,
    difference_interval,
    fraction_interval,
    mean_interval,
)
from poly_epo_jax.metrics.majority import majority_at_k
from poly_epo_jax.metrics.pass_at_k import best_of_k, pass_at_k

NUM_GENERATIONS, NUM_SAMPLES, NUM_PROBLEMS, NUM_GROUPS = 16, 1000, 20_000, 3000
KS = (1, 4, 8, 16)
SIZES, SEEDS = (10, 20, 60, 200, 500), (2, 3, 5)

Draw = Callable[[np.random.Generator, int], Float[np.ndarray, " problems"]]
Change = Callable[[np.random.Generator, np.ndarray], Float[np.ndarray, " problems"]]
Bounds = tuple[np.ndarray, np.ndarray]


def beta(a: float, b: float, never: float = 0.0) -> Draw:
    """Returns a beta distribution of success rates. A fraction `never` of the problems has the success rate 0."""
    return lambda rng, size: rng.beta(a, b, size) * (rng.random(size) >= never)


def always_or_never(chance: float) -> Draw:
    """Returns a distribution of success rates 1, with probability `chance`, and 0. All values of pass@k are 0 or 1."""
    return lambda rng, size: (rng.random(size) < chance).astype(float)


def shift(mean: float, deviation: float = 0.0) -> Change:
    """Returns a change of the logits of success rates by normally distributed numbers."""
    return lambda rng, rates: expit(logit(rates) + mean + deviation * rng.standard_normal(rates.shape))


def flip(gained: float, lost: float) -> Change:
    """Returns a change of success rates from 0 to 1 and from 1 to 0, with these probabilities."""
    return lambda rng, rates: np.where(rng.random(rates.shape) < np.where(rates > 0.5, lost, gained), 1 - rates, rates)


def power(exponent: float) -> Change:
    """Returns a change of success rates p to p^exponent."""
    return lambda rng, rates: rates**exponent


MIXED = {
    "Beta(0.5, 0.5)": beta(0.5, 0.5),
    "uniform": beta(1, 1),
    "Beta(5, 2)": beta(5, 2),
    "Beta(5, 1), 3% never solved": beta(5, 1, 0.03),
    "Beta(0.2, 1.8)": beta(0.2, 1.8),
    "Beta(0.05, 1.95)": beta(0.05, 1.95),
}
BINARY = {f"0/1, {chance:g} solved": always_or_never(chance) for chance in (0.025, 0.5, 0.97, 0.99)}
CHANGES = {"logit + 0.5": shift(0.5), "logit + 1": shift(1), "logit + N(0, 1)": shift(0, 1), "p^0.5": power(0.5)}
FLIPS = {"3% gained": flip(0.03, 0), "30% gained": flip(0.3, 0), "10% exchanged": flip(0.1, 0.1)}


def student(values: Float[np.ndarray, " problems *samples"]) -> Bounds:
    """Returns Student's interval over problems."""
    size = len(values)
    half = stdtrit(size - 1, 0.975) * values.std(axis=0, ddof=1) / size**0.5
    return values.mean(axis=0) - half, values.mean(axis=0) + half


def bonett_price(values: Float[np.ndarray, " problems *samples"]) -> Bounds:
    """Returns Student's interval with two additional differences, +1 and -1."""
    ones = np.ones((1, *values.shape[1:]))
    return student(np.concatenate([values, ones, -ones]))


def over_seeds(values: Float[np.ndarray, " seeds *samples"]) -> Bounds:
    """Returns `mean_interval` of each sample."""
    table = values.reshape(len(values), -1).T
    _, low, high = np.array([mean_interval(row) for row in table]).T.reshape(3, *values.shape[1:])
    return low, high


class Quantity(NamedTuple):
    """A quantity whose interval is printed.

    Attributes:
      metrics: Names of the metrics.
      populations: Values of the population by name, of shape [problems, metrics].
      intervals: Intervals by name, the printed one first.
      sizes: Numbers of problems or seeds.
    """

    metrics: tuple[str, ...]
    populations: Mapping[str, Float[np.ndarray, "problems metrics"]]
    intervals: Mapping[str, Callable[[np.ndarray], Bounds]]
    sizes: tuple[int, ...]


FRACTION = {"fraction_interval": fraction_interval, "bootstrap_interval": bootstrap_interval}
RAND = FRACTION | {"fraction_interval": partial(fraction_interval, bounds=(-0.5, 1.0))}
DIFFERENCE = {
    "difference_interval": difference_interval,
    "bootstrap_interval": bootstrap_interval,
    "Student's t": student,
    "Bonett-Price": bonett_price,
    "fraction_interval, scaled": partial(fraction_interval, bounds=(-1.0, 1.0)),
}


def solved(rng: np.random.Generator, rates: Float[np.ndarray, " problems"]) -> Float[np.ndarray, "problems k"]:
    """Returns pass@k of simulated responses to each problem, for each k of `KS`."""
    correct = rng.binomial(NUM_GENERATIONS, rates)
    return np.stack([pass_at_k(NUM_GENERATIONS, correct, k) for k in KS], axis=1)


def best(rng: np.random.Generator, means: Float[np.ndarray, " problems"]) -> Float[np.ndarray, "problems k"]:
    """Returns the largest of k simulated rewards between 0 and 1 of each problem, for each k of `KS`."""
    a, b = (3 * np.clip(one, 1e-6, None)[:, None] for one in (means, 1 - means))
    rewards = rng.beta(a, b, (len(means), NUM_GENERATIONS))
    return np.stack([best_of_k(rewards, k) for k in KS], axis=1)


def votes(rng: np.random.Generator, rates: Float[np.ndarray, " problems"]) -> Float[np.ndarray, "problems 2"]:
    """Returns accuracy and vote share of the majority of all responses. Incorrect answers have one of two values."""
    is_correct = rng.random((len(rates), NUM_GENERATIONS)) < rates[:, None]
    answers = np.where(is_correct, 0, 1 + (rng.random(is_correct.shape) < 0.3))
    return np.stack(majority_at_k(answers, is_correct, NUM_GENERATIONS), axis=1)


def agreement(rng: np.random.Generator, error: float) -> Float[np.ndarray, "problems 2"]:
    """Returns adjusted Rand index and V-measure of 4 strategies with clusters of which a fraction `error` is random."""
    strategies = rng.integers(0, 4, (NUM_GROUPS, 8))
    clusters = np.where(rng.random(strategies.shape) < error, rng.integers(0, 4, strategies.shape), strategies)
    pairs = list(zip(strategies, clusters, strict=True))
    return np.array([[adjusted_rand_index(*pair), v_measure(*pair)] for pair in pairs])


def differences(
    rng: np.random.Generator, rates: Mapping[str, np.ndarray], changes: Mapping[str, Change]
) -> dict[str, Float[np.ndarray, "problems k"]]:
    """Returns paired differences in pass@k of a second model, whose success rates are changed, by name."""
    return {
        f"{name}, {change}": solved(rng, changes[change](rng, values)) - solved(rng, values)
        for name, values in rates.items()
        for change in changes
    }


def quantities(rng: np.random.Generator) -> dict[str, Quantity]:
    """Returns all quantities whose interval is printed, by name."""
    mixed, binary = ({name: draw(rng, NUM_PROBLEMS) for name, draw in draws.items()} for draws in (MIXED, BINARY))
    paired = differences(rng, mixed, CHANGES) | differences(rng, binary, FLIPS)
    at_k = tuple(f"k = {k}" for k in KS)
    errors = {f"{error:.0%} random": agreement(rng, error) for error in (0.02, 0.1, 0.3, 1.0)}
    rand, v = ({name: values[:, [column]] for name, values in errors.items()} for column in (0, 1))
    # Differences over seeds: of normally distributed values, and of the solved fraction of 40 problems.
    few = rng.binomial(40, 0.98 + 0.02 * rng.random((2, NUM_PROBLEMS, 1))) / 40
    seeds = {"normal": 0.02 * rng.standard_normal((NUM_PROBLEMS, 1)), "40 problems, 99% solved": few[0] - few[1]}
    return {
        "pass@k": Quantity(
            at_k, {name: solved(rng, rates) for name, rates in (mixed | binary).items()}, FRACTION, SIZES
        ),
        "best of k": Quantity(
            at_k, {name: best(np.random.default_rng(1), rates) for name, rates in mixed.items()}, FRACTION, SIZES
        ),
        "majority@16": Quantity(
            ("accuracy", "vote share"), {name: votes(rng, rates) for name, rates in mixed.items()}, FRACTION, SIZES
        ),
        "difference in pass@k": Quantity(at_k, paired, DIFFERENCE, SIZES),
        "adjusted Rand index": Quantity(("8 responses",), rand, RAND, SIZES),
        "V-measure": Quantity(("8 responses",), v, FRACTION, SIZES),
        "difference over seeds": Quantity(("a metric",), seeds, {"mean_interval": over_seeds}, SEEDS),
    }


def measure(
    population: Float[np.ndarray, "problems metrics"], size: int, interval: Callable[[np.ndarray], Bounds]
) -> Float[np.ndarray, "3 metrics"]:
    """Returns coverage, mean width and fraction of intervals with zero width, for each metric."""
    rows = np.random.default_rng(size).integers(len(population), size=(size, NUM_SAMPLES))
    low, high = interval(population[rows])
    truth, widths = population.mean(axis=0), high - low
    is_zero = widths <= ROUNDING
    covered = (low <= truth) & (truth <= high) & ~is_zero
    return np.array([covered.mean(axis=0), widths.mean(axis=0), is_zero.mean(axis=0)])


def main() -> None:
    """Prints the table, as Markdown."""
    columns = ["quantity", "interval", "problems or seeds", "mean coverage", "lowest", "in", "width", "zero width"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for title, quantity in quantities(np.random.default_rng(0)).items():
        for name, interval in quantity.intervals.items():
            for size in quantity.sizes:
                found = np.array([measure(values, size, interval) for values in quantity.populations.values()])
                coverage, width, is_zero = found.transpose(1, 0, 2)
                case, metric = np.unravel_index(coverage.argmin(), coverage.shape)
                worst = f"{[*quantity.populations][case]}; {quantity.metrics[metric]}"
                figures = f"{coverage.mean():.3f} | {coverage.min():.3f} | {worst} | {width.mean():.3f}"
                print(f"| {title} | {name} | {size} | {figures} | {is_zero.max():.3f} |", flush=True)


if __name__ == "__main__":
    main()
