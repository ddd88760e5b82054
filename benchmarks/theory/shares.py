"""Which responses a group's advantages pay: reward shaping's threshold and Poly-EPO's, the covariance term, n and N.

All advantages are expectations over the others of a group. Those of different methods are compared in units of the
method's typical size (`bandit.typical_size`).
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
PAIRS = [(8, n) for n in range(2, 8)] + [(N, 4) for N in (5, 6, 16, 32, 64)]  # N and n
TWO = strategies([0.7, 0.3], [0.7, 1 / 3])  # a common strategy that often succeeds, and a rarer one that seldom does
RARE_IS_BETTER = strategies([0.7, 0.3], [0.4, 0.9])
ALIKE = strategies([0.7, 0.3], [0.6, 0.6])
KINDS = {"novel wrong": (0.0, NOVEL), "novel right": (1.0, NOVEL), "rare right": (1.0, 2), "common right": (1.0, 1)} | {
    "rare wrong": (0.0, 2),
    "common wrong": (0.0, 1),
}


@functools.cache
def polychromic(set_size: int = SET_SIZE) -> Advantages:
    return functools.partial(set_rl.polychromic_advantages, set_size=set_size)


@functools.cache
def shaping(div_coef: float = DIV_COEF) -> Advantages:
    return functools.partial(set_rl.grpo_div_advantages, div_coef=div_coef)


def thresholds() -> list[dict]:
    """From which success rate on GRPO+DIV holds a novel wrong response back, against the paper's lambda (1 - E[d]).

    E[d] is that of a group from the policy; "beside it", that of the others in a group that holds the novel response.
    """
    return [
        {
            "lambda": div_coef,
            "strategies": num_strategies,
            "promised": div_coef * (1 - _mean_rarity(num_strategies, novel=0)),
            "beside it": div_coef * (1 - _mean_rarity(num_strategies, novel=1)),
            "measured": _crossing(SUCCESS, _novel_wrong(shaping(div_coef), num_strategies, SUCCESS)),
        }
        for div_coef in (0.25, 0.5, 1.0)
        for num_strategies in (1, 2, 4)
    ]


def own_thresholds(set_sizes: Iterable[int] = range(2, NUM_GENERATIONS)) -> list[dict]:
    """Up to how many equally likely strategies Poly-EPO pays a novel wrong response: it depends on n, and not on p.

    Promised: where rewards say nothing of strategies, (n - 1) (1 + D_{n-1}) > n D_n, with D_k the distinct ones of k.
    """

    def distinct(k: int, m: int) -> float:
        return m * (1 - (1 - 1 / m) ** k)

    rows = []
    for n in set_sizes:
        holds = [m for m in range(1, 6) if (n - 1) * (1 + distinct(n - 1, m)) > n * distinct(n, m) + 1e-9]
        paid = [_novel_wrong(polychromic(n), m, np.array(FEW)) > 1e-9 for m in range(1, 6)]
        row = {"set size": n, "promised": max(holds, default=0)}
        rows.append(row | {f"at p = {p}": int(np.sum(paid, axis=0)[i]) for i, p in enumerate(FEW)})
    return rows


def curves() -> list[dict]:
    """Credit of a novel wrong response over the success rate, in typical sizes."""
    drawn = [("Poly-EPO", polychromic(), m) for m in (1, 2, 4)] + [("GRPO+DIV", shaping(), m) for m in (1, 4)]
    columns = {
        f"{name}, {m} {'strategy' if m == 1 else 'strategies'}": _novel_wrong(function, m, SUCCESS)
        / typical_size(function, _equal(m, SUCCESS), NUM_GENERATIONS)
        for name, function, m in drawn
    }
    return [{"success": p} | {name: values[i] for name, values in columns.items()} for i, p in enumerate(SUCCESS)]


def methods() -> dict[str, Advantages]:
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
    """What each kind of response gets by each method; the parts of polychromic in its own typical size.

    "Of the policy" are the parts in the paper's equation, whose baseline is over sets from the policy. Those of a group
    have the group's own sets for a baseline, among them those that hold the response.
    """
    rows = []
    for setting, arms in (("common succeeds more", TWO), ("rare succeeds more", RARE_IS_BETTER), ("alike", ALIKE)):
        whole = typical_size(polychromic(), arms, NUM_GENERATIONS)
        for method, function in methods().items():
            unit = whole if method.startswith("its") else typical_size(function, arms, NUM_GENERATIONS)
            paid = {kind: credit(function, arms, NUM_GENERATIONS, *what).mean / unit for kind, what in KINDS.items()}
            rows.append({"setting": setting, "method": method} | paid)
        shrunk = (1 - SET_SIZE / NUM_GENERATIONS) / whole
        parts = {kind: _parts_of_policy(arms, *what) for kind, what in KINDS.items()}
        for index, part in enumerate(("its product, of the policy", "its covariance, of the policy")):
            rows.append(
                {"setting": setting, "method": part} | {kind: shrunk * pair[index] for kind, pair in parts.items()}
            )
    return rows


def _parts_of_policy(arms: Arms, reward: float, cluster: int) -> tuple[float, float]:
    """Product and covariance of the paper's equation for the polychromic advantage of a response."""

    def moments(sets: np.ndarray, chances: np.ndarray, holds: bool) -> tuple[float, float]:
        rewards, clusters = arms.rewards[sets], arms.clusters[sets]
        if holds:
            rewards = np.insert(rewards, 0, reward, axis=1)
            clusters = np.insert(clusters, 0, cluster, axis=1)
        mean_reward, distinct = rewards.mean(axis=1), np.asarray(diversity(clusters))
        product = (chances @ mean_reward) * (chances @ distinct)
        return float(product), float(chances @ (mean_reward * distinct) - product)

    beside = moments(*all_groups(arms.chances, SET_SIZE - 1), holds=True)
    usual = moments(*all_groups(arms.chances, SET_SIZE), holds=False)
    return beside[0] - usual[0], beside[1] - usual[1]


def sizes() -> list[dict]:
    """Set sizes 2 to 7 of N = 8, and N = 5 to 64 with sets of 4, in the first setting."""
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
    """E[d] of responses from the policy, in a group that holds so many novel ones besides."""
    arms = _equal(num_strategies, np.array([0.5]))
    groups, chances = all_groups(arms.chances, NUM_GENERATIONS - novel)
    clusters = np.pad(arms.clusters[groups], ((0, 0), (novel, 0)), constant_values=NOVEL)
    return (chances @ np.asarray(rarity(jnp.asarray(clusters)))[:, novel:].mean(axis=1)).item()


def _crossing(x: np.ndarray, y: np.ndarray) -> float:
    """Where y falls through 0, or 1 where it does not."""
    below = np.flatnonzero(y < 0)
    if not below.size or not below[0]:
        return float(not below.size)
    i = below[0]
    return float(np.interp(0, [y[i], y[i - 1]], [x[i], x[i - 1]]))
