"""Measures the computation of polychromic advantages for 128 prompts: python benchmarks/advantages.py

At N = 64, n = 8, the closed form is equivalent to 4.4 billion sets per prompt. At the paper's N = 8, n = 4, the closed
form and the vectorized computation of all 70 sets are compared with a Python loop over prompts and sets.
"""

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from poly_epo_jax import set_rl

NUM_PROMPTS = 128


def random_batch(num_generations: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random rewards and clusters of shape [NUM_PROMPTS, num_generations]."""
    rng = np.random.default_rng(0)
    shape = (NUM_PROMPTS, num_generations)
    return rng.integers(0, 2, shape).astype(np.float32), rng.integers(1, 6, shape).astype(np.int32)


def python_loop(rewards: np.ndarray, clusters: np.ndarray, set_size: int) -> list[list[float]]:
    """Computes the advantages with a loop over prompts and sets (Algorithm 1 of the paper).

    Args:
      rewards: Rewards [P, N].
      clusters: Cluster ids [P, N].
      set_size: Number n of generations per set.

    Returns:
      Advantages [P, N].
    """
    advantages = []
    for r, c in zip(rewards.tolist(), clusters.tolist(), strict=True):
        sets = list(itertools.combinations(range(len(r)), set_size))
        scores = []
        for members in sets:
            num_clusters = len({c[i] for i in members} - {set_rl.DEGENERATE_CLUSTER})
            scores.append(sum(r[i] for i in members) / set_size * num_clusters / set_size)
        baseline = sum(scores) / len(sets)
        held = [[s - baseline for s, members in zip(scores, sets, strict=True) if y in members] for y in range(len(r))]
        advantages.append([sum(values) / len(values) for values in held])
    return advantages


def median_milliseconds(function: Callable, *arguments: object, repeats: int) -> float:
    """Measures a function after one call that compiles it.

    Args:
      function: Function to measure.
      *arguments: Arguments of the function.
      repeats: Number of measured calls.

    Returns:
      The median time of a call in milliseconds.
    """
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    """Measures the implementations and prints a table."""

    def closed_form(set_size: int) -> Callable:
        return jax.jit(functools.partial(set_rl.polychromic_advantages, set_size=set_size))

    all_sets = jax.jit(
        lambda rewards, clusters: set_rl.marginal_set_advantages(
            set_rl.polychromic, set_rl.enumerate_sets(8, 4), rewards=rewards, clusters=clusters
        )
    )
    small, large = random_batch(8), random_batch(64)
    expected = python_loop(*small, set_size=4)
    for function in (closed_form(4), all_sets):
        np.testing.assert_allclose(function(*small), expected, atol=1e-6)

    loop = median_milliseconds(functools.partial(python_loop, set_size=4), *small, repeats=5)
    rows = [
        ("Python loop", 8, 4, loop),
        ("all sets, vectorized", 8, 4, median_milliseconds(all_sets, *small, repeats=200)),
        ("closed form", 8, 4, median_milliseconds(closed_form(4), *small, repeats=200)),
        ("closed form", 64, 8, median_milliseconds(closed_form(8), *large, repeats=200)),
    ]
    print(f"{NUM_PROMPTS} prompts on {jax.devices()[0].device_kind}, median time per batch")
    print(f"{'method':22}{'N':>4}{'n':>4}{'sets per prompt':>18}{'ms':>10}{'relative to loop':>18}")
    for method, num_generations, set_size, milliseconds in rows:
        ratio = f"{loop / milliseconds:.0f}x faster" if num_generations == 8 and method != "Python loop" else "-"
        num_sets = math.comb(num_generations, set_size)
        print(f"{method:22}{num_generations:4}{set_size:4}{num_sets:18,}{milliseconds:10.3f}{ratio:>18}")


if __name__ == "__main__":
    main()
