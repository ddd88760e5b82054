"""Measures the coverage of 95% intervals over problems: python benchmarks/intervals.py

Each simulated benchmark has problems with success rates from one of the distributions below, and 16 generations per
problem. The tables compare the intervals of metrics/intervals.py: the fraction of 2,000 benchmarks whose interval
contains the true mean of pass@k, and the mean width of the intervals. Paired differences compare a second model, whose
success rate is p^0.8 where that of the first is p.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from poly_epo_jax.metrics.intervals import bootstrap_interval, fraction_interval
from poly_epo_jax.metrics.pass_at_k import pass_at_k

NUM_GENERATIONS, NUM_BENCHMARKS, NUM_TRUTH = 16, 2000, 1_000_000
SIZES, KS = (10, 30, 60, 200), (1, 4, 15, 16)

Rates = Callable[[np.random.Generator, tuple[int, ...]], Float[np.ndarray, "..."]]


def always_or_never(chance: float) -> Rates:
    """Returns a distribution of success rates 1, with probability `chance`, and 0. All values of pass@k are 0 or 1."""
    return lambda rng, shape: (rng.random(shape) < chance).astype(float)


def beta(a: float, b: float, never: float = 0.0) -> Rates:
    """Returns a beta distribution of success rates. A fraction `never` of the problems has the success rate 0."""
    return lambda rng, shape: rng.beta(a, b, shape) * (rng.random(shape) >= never)


BINARY = {f"0/1, {chance:g} solved": always_or_never(chance) for chance in (0.5, 0.9, 0.97, 0.99, 0.025)}
MIXED = {
    "Beta(5, 1), 3% never solved": beta(5, 1, 0.03),
    "Beta(5, 2)": beta(5, 2),
    "uniform": beta(1, 1),
    "Beta(0.2, 1.8)": beta(0.2, 1.8),
    "Beta(0.05, 1.95)": beta(0.05, 1.95),
}


def curves(correct: Int[np.ndarray, "problems benchmarks"], ks: Sequence[int]) -> Float[np.ndarray, "problems all k"]:
    """Returns pass@k of each problem of each benchmark, for each k."""
    found = [pass_at_k(NUM_GENERATIONS, correct.ravel(), k).reshape(correct.shape) for k in ks]
    return np.stack(found, axis=-1)


def coverage(low: np.ndarray, high: np.ndarray, truth: np.ndarray) -> list[str]:
    """Returns coverage and mean width for each k, as text."""
    covered, width = np.mean((low <= truth) & (truth <= high), axis=0), np.mean(high - low, axis=0)
    return [f"{share:.3f} ({wide:.3f})" for share, wide in zip(covered, width, strict=True)]


def measure(rates: Rates, num_problems: int, ks: Sequence[int]) -> tuple[np.ndarray, list[str], list[str]]:
    """Returns the true means of pass@k, and the coverage of both intervals for each k."""
    rng = np.random.default_rng(num_problems)
    many = rates(rng, (NUM_TRUTH,))
    truth = np.array([np.mean(1 - (1 - many) ** k) for k in ks])
    values = curves(rng.binomial(NUM_GENERATIONS, rates(rng, (num_problems, NUM_BENCHMARKS))), ks)
    return truth, coverage(*bootstrap_interval(values), truth), coverage(*fraction_interval(values), truth)


def measure_difference(rates: Rates, num_problems: int, ks: Sequence[int]) -> list[str]:
    """Returns the coverage of the bootstrap for paired differences in pass@k, for each k."""
    rng = np.random.default_rng(num_problems)
    many, ours = rates(rng, (NUM_TRUTH,)), rates(rng, (num_problems, NUM_BENCHMARKS))
    truth = np.array([np.mean((1 - many) ** k - (1 - many**0.8) ** k) for k in ks])
    first, second = (curves(rng.binomial(NUM_GENERATIONS, chance), ks) for chance in (ours, ours**0.8))
    return coverage(*bootstrap_interval(second - first), truth)


def main() -> None:
    """Prints the tables, as Markdown."""
    print("| success rates | problems | k | mean | bootstrap (width) | fraction_interval (width) |")
    print("|---|---|---|---|---|---|")
    for name, rates in {**BINARY, **MIXED}.items():
        ks = KS if name in MIXED else (NUM_GENERATIONS,)
        for num_problems in SIZES:
            for k, truth, *shown in zip(ks, *measure(rates, num_problems, ks), strict=True):
                print(f"| {name} | {num_problems} | {k} | {truth:.3f} | {' | '.join(shown)} |", flush=True)
    print("\n| success rates | problems | " + " | ".join(f"difference at k = {k} (width)" for k in KS) + " |")
    print("|---|---|" + "---|" * len(KS))
    for name, rates in MIXED.items():
        for num_problems in SIZES:
            print(
                f"| {name} | {num_problems} | {' | '.join(measure_difference(rates, num_problems, KS))} |", flush=True
            )


if __name__ == "__main__":
    main()
