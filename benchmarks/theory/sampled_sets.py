"""Measures the bias and noise of advantages from K sampled sets, compared with all C(N, n) sets.

For one group, an advantage from K sets has the expectation A M_K / M, where A is the advantage from all sets, M_K =
(N/n) q - 1, and q is the probability that a generation is in at least one set. Proposition 3.1 therefore holds for each
group, and not only on average.
"""

import functools
import math

import jax
import numpy as np
from bandit import Values
from shares import NUM_GENERATIONS, SET_SIZE, TWO, polychromic

from poly_epo_jax import set_rl

NUM_GROUPS, NUM_DRAWS, NUM_SETS = 32, 1000, (2, 4, 8, 16, 35, 70)


def run() -> list[dict]:
    """Measures the scaling factor of advantages, their noise, and the generations that a gradient requires, for each K.

    The factor is compared with its predicted value.
    """
    rng = np.random.default_rng(0)
    arms = rng.choice(len(TWO.chances), (NUM_GROUPS, NUM_GENERATIONS), p=TWO.chances)
    rewards, clusters = TWO.rewards[arms], TWO.clusters[arms]
    exact = np.asarray(polychromic()(rewards, clusters))
    rows = []
    for num_sets in NUM_SETS:
        repeated = (np.tile(values, (NUM_DRAWS, 1)) for values in (rewards, clusters))
        draws = np.asarray(_advantages(*repeated, num_sets)).reshape(NUM_DRAWS, NUM_GROUPS, NUM_GENERATIONS)
        mean, spread = draws.mean(axis=0), draws.std(axis=0)
        factor = (mean * exact).sum() / (exact**2).sum()
        error = np.sqrt((spread**2 * exact**2).sum() / NUM_DRAWS) / (exact**2).sum()
        deviation = np.abs(mean - factor * exact).max() / (spread.max() / math.sqrt(NUM_DRAWS) + 1e-12)
        rows.append(
            {
                "K": num_sets,
                "promised": promised(num_sets) / promised(math.comb(NUM_GENERATIONS, SET_SIZE)),
                "measured": factor,
                "standard error": error,
                "largest departure, in standard errors": deviation,
                "noise of the sets": math.sqrt((spread**2).mean() / (mean**2).mean()),
                "generations for noise = signal": _needed(num_sets),
            }
        )
    return rows


def promised(num_sets: int) -> float:
    """Returns the predicted constant M_K for K = `num_sets`."""
    N, n = NUM_GENERATIONS, SET_SIZE
    q = 1 - math.comb(math.comb(N - 1, n), num_sets) / math.comb(math.comb(N, n), num_sets)
    return N / n * q - 1


@functools.partial(jax.jit, static_argnums=2)
def _advantages(rewards: Values, clusters: Values, num_sets: int) -> jax.Array:
    """Computes advantages from sets that are sampled separately for each prompt."""
    keys = jax.random.split(jax.random.key(num_sets), len(rewards))
    sets = jax.vmap(lambda key: set_rl.sample_sets(key, NUM_GENERATIONS, SET_SIZE, num_sets))(keys)
    return set_rl.marginal_set_advantages(set_rl.polychromic, sets, rewards=rewards, clusters=clusters)


def _needed(num_sets: int) -> float:
    """Returns the number of generations at which the mean gradient of the logits equals its standard error."""
    rng = np.random.default_rng(1)
    arms = rng.choice(len(TWO.chances), (NUM_GROUPS * NUM_DRAWS, NUM_GENERATIONS), p=TWO.chances)
    found = np.asarray(_advantages(TWO.rewards[arms], TWO.clusters[arms], num_sets))
    estimates = (found[:, :, None] * (np.eye(len(TWO.chances))[arms] - TWO.chances)).sum(axis=1)
    noise = estimates.var(axis=0).sum()
    signal = (estimates.mean(axis=0) ** 2).sum() - noise / len(estimates)  # Subtracts the noise of the mean.
    return float(NUM_GENERATIONS * noise / signal)
