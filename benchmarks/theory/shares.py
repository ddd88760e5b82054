"""Computes which responses get a positive advantage: thresholds, the covariance term, and the influence of n and N.

All advantages are expectations over the other responses in a group. To compare methods, they are divided by the RMS
advantage of the method (`bandit.typical_size`).
"""

import functools
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from bandit import NOVEL, Advantages, Arms, all_groups, credit, gradient, strategies, typical_size
from jaxtyping import Float

from poly_epo_jax import set_rl
from poly_epo_jax.set_rl.groups import rarity
from poly_epo_jax.set_rl.objectives import diversity

NUM_GENERATIONS, SET_SIZE, DIV_COEF = 8, 4, 0.5
SUCCESS = np.linspace(0.02, 0.98, 25)
FEW = (0.1, 0.5, 0.9)
PAIRS = [(8, n) for n in range(2, 8)] + [(N, 4) for N in (5, 6, 16, 32, 64)]  # (N, n)
TWO = strategies([0.7, 0.3], [0.7, 1 / 3])  # The common strategy succeeds more often than the rare one.
RARE_IS_BETTER = strategies([0.7, 0.3], [0.4, 0.9])
ALIKE = strategies([0.7, 0.3], [0.6, 0.6])
KINDS = {"novel wrong": (0.0, NOVEL), "novel right": (1.0, NOVEL), "rare right": (1.0, 2), "common right": (1.0, 1)} | {
    "rare wrong": (0.0, 2),
    "common wrong": (0.0, 1),
}


@functools.cache
def polychromic(set_size: int = SET_SIZE) -> Advantages:
    """Returns Poly-EPO's advantage estimator."""
    return functools.partial(set_rl.polychromic_advantages, set_size=set_size)


@functools.cache
def shaping(diversity_coef: float = DIV_COEF) -> Advantages:
    """Returns the advantage estimator of GRPO+DIV with lambda = `diversity_coef`."""
    return functools.partial(set_rl.grpo_div_advantages, diversity_coef=diversity_coef)


def thresholds() -> list[dict]:
    """Measures the success rate above which GRPO+DIV assigns a novel incorrect response a negative advantage.

    The threshold is compared with the paper's lambda (1 - E[d]), where E[d] is computed for a group from the policy
    ("promised") and for the other responses in a group with the novel response ("beside it").
    """
    return [
        {
            "lambda": diversity_coef,
            "strategies": num_strategies,
            "promised": diversity_coef * (1 - _mean_rarity(num_strategies, novel=0)),
            "beside it": diversity_coef * (1 - _mean_rarity(num_strategies, novel=1)),
            "measured": _crossing(SUCCESS, _novel_wrong(shaping(diversity_coef), num_strategies, SUCCESS)),
        }
        for diversity_coef in (0.25, 0.5, 1.0)
        for num_strategies in (1, 2, 4)
    ]


def own_thresholds(set_sizes: Iterable[int] = range(2, NUM_GENERATIONS)) -> list[dict]:
    """Measures the maximum number of equally likely strategies with a positive advantage of a novel incorrect response.

    The number depends on n, but not on the success rate p. It is compared with the prediction for rewards that do not
    depend on strategies: (n - 1) (1 + D_{n-1}) > n D_n, where D_k is the expected number of distinct strategies in k
    responses.
    """

    def distinct(k: int, m: int) -> float:
        return m * (1 - (1 - 1 / m) ** k)

    rows = []
    for n in set_sizes:
        holds = [m for m in range(1, 6) if (n - 1) * (1 + distinct(n - 1, m)) > n * distinct(n, m) + 1e-9]
        positive = [_novel_wrong(polychromic(n), m, np.array(FEW)) > 1e-9 for m in range(1, 6)]
        row = {"set size": n, "promised": max(holds, default=0)}
        rows.append(row | {f"at p = {p}": int(np.sum(positive, axis=0)[i]) for i, p in enumerate(FEW)})
    return rows


def curves() -> list[dict]:
    """Computes the advantage of a novel incorrect response at each success rate, divided by the RMS advantage."""
    compared = [("Poly-EPO", polychromic(), m) for m in (1, 2, 4)] + [("GRPO+DIV", shaping(), m) for m in (1, 4)]
    columns = {
        f"{name}, {m} {'strategy' if m == 1 else 'strategies'}": _novel_wrong(function, m, SUCCESS)
        / typical_size(function, _equal(m, SUCCESS), NUM_GENERATIONS)
        for name, function, m in compared
    }
    return [{"success": p} | {name: values[i] for name, values in columns.items()} for i, p in enumerate(SUCCESS)]


def methods() -> dict[str, Advantages]:
    """Returns the compared advantage estimators by name."""

    def part(index: int) -> Advantages:
        return lambda rewards, clusters: set_rl.exploration_exploitation_synergy(rewards, clusters, SET_SIZE)[index]

    return {
        "polychromic": polychromic(),
        "its product": part(0),
        "its covariance": part(1),
        "sum over sets": functools.partial(set_rl.reward_plus_diversity_advantages, set_size=SET_SIZE),
        "r + d/2 of one (GRPO+DIV)": shaping(),
        "r d of one": set_rl.shaped_product_advantages,
        "r (GRPO)": lambda rewards, clusters: set_rl.grpo_advantages(rewards),
    }


def kinds() -> list[dict]:
    """Computes the advantage of each kind of response with each method, divided by the RMS advantage of the method.

    The components of the polychromic advantage are divided by the RMS of the polychromic advantage. The components "of
    the policy" are those of the paper's equation, whose baseline is the mean over sets from the policy. For the other
    components, the baseline is the mean over the sets of the group, which include sets with the response.
    """
    rows = []
    for setting, arms in (("common succeeds more", TWO), ("rare succeeds more", RARE_IS_BETTER), ("alike", ALIKE)):
        whole = typical_size(polychromic(), arms, NUM_GENERATIONS)
        for method, function in methods().items():
            unit = whole if method.startswith("its") else typical_size(function, arms, NUM_GENERATIONS)
            means = {kind: credit(function, arms, NUM_GENERATIONS, *what).mean / unit for kind, what in KINDS.items()}
            rows.append({"setting": setting, "method": method} | means)
        shrunk = (1 - SET_SIZE / NUM_GENERATIONS) / whole
        parts = {kind: _parts_of_policy(arms, *what) for kind, what in KINDS.items()}
        for index, part in enumerate(("its product, of the policy", "its covariance, of the policy")):
            rows.append(
                {"setting": setting, "method": part} | {kind: shrunk * pair[index] for kind, pair in parts.items()}
            )
    return rows


def _parts_of_policy(arms: Arms, reward: float, cluster: int) -> tuple[float, float]:
    """Returns the product and covariance terms of the paper's equation for the polychromic advantage of a response."""

    def moments(sets: np.ndarray, chances: np.ndarray, holds: bool) -> tuple[float, float]:
        rewards, clusters = arms.rewards[sets], arms.clusters[sets]
        if holds:
            rewards = np.insert(rewards, 0, reward, axis=1)
            clusters = np.insert(clusters, 0, cluster, axis=1)
        mean_reward, distinct = rewards.mean(axis=1), np.asarray(diversity(clusters))
        product = (chances @ mean_reward) * (chances @ distinct)
        return float(product), float(chances @ (mean_reward * distinct) - product)

    with_response = moments(*all_groups(arms.chances, SET_SIZE - 1), holds=True)
    baseline = moments(*all_groups(arms.chances, SET_SIZE), holds=False)
    return with_response[0] - baseline[0], with_response[1] - baseline[1]


def sizes() -> list[dict]:
    """Computes advantages in the first setting for set sizes 2 to 7 with N = 8, and for N = 5 to 64 with sets of 4."""
    return [_size(N, n) for N, n in PAIRS]


def _size(num_generations: int, set_size: int) -> dict:
    function = polychromic(set_size)
    unit = typical_size(function, TWO, num_generations)
    row: dict = {"N": num_generations, "n": set_size, "typical size": unit}
    for kind in ("novel wrong", "novel right"):
        mean, spread = credit(function, TWO, num_generations, *KINDS[kind])
        row |= {kind: mean / unit, f"{kind}, deviation": spread / unit}
    found = gradient(function, TWO, num_generations)
    return row | {"generations for noise = signal": num_generations * found.variance / (found.mean @ found.mean)}


def _equal(num_strategies: int, success: np.ndarray) -> Arms:
    return strategies([1 / num_strategies] * num_strategies, np.repeat(success[:, None], num_strategies, axis=1))


def _novel_wrong(function: Advantages, num_strategies: int, success: np.ndarray) -> Float[np.ndarray, " bandits"]:
    return credit(function, _equal(num_strategies, success), NUM_GENERATIONS, 0.0, NOVEL).mean


def _mean_rarity(num_strategies: int, novel: int) -> float:
    """Returns E[d] of responses from the policy in a group with `novel` additional novel responses."""
    arms = _equal(num_strategies, np.array([0.5]))
    groups, chances = all_groups(arms.chances, NUM_GENERATIONS - novel)
    clusters = np.pad(arms.clusters[groups], ((0, 0), (novel, 0)), constant_values=NOVEL)
    return (chances @ np.asarray(rarity(jnp.asarray(clusters)))[:, novel:].mean(axis=1)).item()


def _crossing(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the x at which y falls below 0: 1 if y is never negative, and 0 if its first value is negative."""
    below = np.flatnonzero(y < 0)
    if not below.size or not below[0]:
        return float(not below.size)
    i = below[0]
    return float(np.interp(0, [y[i], y[i - 1]], [x[i], x[i - 1]]))
