"""From rewards and clusters [P, N] to one advantage per generation [P, N] (paper §3, §4; baselines of §6)."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Float, Int, Shaped

from poly_epo_jax.set_rl.sets import check_set_size
from poly_epo_jax.types import DEGENERATE_CLUSTER

SetObjective = Callable[..., Float[Array, "*prompts K"]]
ClosedForm = Callable[..., Float[Array, "P N"]]


def features_read(function: Callable[..., Array]) -> tuple[str, ...]:
    """The features that an objective reads: its parameters, by name."""
    return tuple(inspect.signature(function).parameters)


def marginal_set_advantages(
    objective: SetObjective,
    sets: Int[Array | np.ndarray, "K n"] | Int[Array | np.ndarray, "P K n"],
    **features: Shaped[Array | np.ndarray, "P N ..."],
) -> Float[Array, "P N"]:
    """Mean advantage of the sets that hold a generation (paper §3, algorithm 1).

    A(G) = f(G) - mean of f over the K sets, and A_marg(y) = mean of A(G) over the constructed sets that hold y, or 0
    where none does.

    Args:
      objective: f, maps gathered features [K, n, ...] of one prompt to scores [K]; see `objectives`. It gets those
        features that its parameters name.
      sets: generation indices, shared by all prompts or one [K, n] table per prompt.
      **features: of each of the N generations of P prompts: rewards, clusters, or your own.

    Raises:
      ValueError: features that hold NaN (seen outside jit only) or disagree on [P, N], a feature that the objective
        names and that is not there, sets of another shape or as large as N, an objective that does not return one score
        per set.
    """
    num_prompts, num_generations = _check_features(**features)
    if sets.ndim not in (2, 3) or (sets.ndim == 3 and len(sets) != num_prompts):
        raise ValueError(f"sets have shape {sets.shape}, but must be [K, n] or [{num_prompts}, K, n], one per prompt.")
    num_sets, set_size = sets.shape[-2:]
    check_set_size(num_generations, set_size)
    reads = features_read(objective)
    missing = [name for name in reads if name not in features]
    if missing:
        raise ValueError(f"The objective reads {missing[0]}, but the features are {', '.join(features)}.")
    features = {name: features[name] for name in reads}

    def one_prompt(sets: Array, features: dict[str, Array]) -> Array:
        scores = objective(**{name: feature[sets] for name, feature in features.items()})
        if scores.shape != (num_sets,):
            raise ValueError(f"The objective returned shape {scores.shape}, but must give one score per set, [K].")
        set_advantages = scores - scores.mean()
        holds = (sets[:, :, None] == jnp.arange(num_generations)[None, None, :]).any(axis=1)  # [K, N]
        return jnp.where(holds, set_advantages[:, None], 0).sum(axis=0) / jnp.maximum(holds.sum(axis=0), 1)

    sets_axis = 0 if sets.ndim == 3 else None
    return jax.vmap(one_prompt, in_axes=(sets_axis, 0))(jnp.asarray(sets), jax.tree.map(jnp.asarray, features))


def polychromic_advantages(
    rewards: Float[Array | np.ndarray, "P N"], clusters: Int[Array | np.ndarray, "P N"], set_size: int
) -> Float[Array, "P N"]:
    """Marginal set advantages of the polychromic objective over all C(N, n) sets, without forming a set (paper §4).

    Equal to `marginal_set_advantages(polychromic, enumerate_sets(N, n), ...)` in O(P N^2), whatever C(N, n) is.

    Raises:
      ValueError: unless 1 <= set_size < N; on NaN rewards (seen outside jit only); on mismatched shapes.
    """
    score, _, _ = _means_given_generation(rewards, clusters, set_size)
    return _centred(score)


class Synergy(NamedTuple):
    """The two parts of the polychromic advantage, each [P, N]; they add up to it."""

    product: Float[Array, "P N"]
    synergy: Float[Array, "P N"]


def exploration_exploitation_synergy(
    rewards: Float[Array | np.ndarray, "P N"], clusters: Int[Array | np.ndarray, "P N"], set_size: int
) -> Synergy:
    """Splits the polychromic advantage into product and synergy (paper §5, Exploration-Exploitation Synergy).

    With R a set's mean reward and d its diversity, over all C(N, n) sets G:
      product = E[R | y in G] E[d | y in G] - E[R] E[d]
      synergy = Cov(R, d | y in G) - Cov(R, d)

    Raises:
      ValueError: as `polychromic_advantages`.
    """
    score, reward, diversity = _means_given_generation(rewards, clusters, set_size)
    product = reward * diversity - reward.mean(axis=-1, keepdims=True) * diversity.mean(axis=-1, keepdims=True)
    return Synergy(product, _centred(score) - product)


def grpo_advantages(rewards: Float[Array | np.ndarray, "P N"]) -> Float[Array, "P N"]:
    """Reward above the prompt's mean, A_i = r_i - mean r, not divided by a standard deviation (paper appendix).

    Raises:
      ValueError: on NaN rewards (seen outside jit only).
    """
    _check_features(rewards=rewards)
    return _centred(jnp.asarray(rewards))


def grpo_div_advantages(
    rewards: Float[Array | np.ndarray, "P N"], clusters: Int[Array | np.ndarray, "P N"], div_coef: float
) -> Float[Array, "P N"]:
    """GRPO with a bonus for small clusters: centred r_i + lambda d_i (paper §6.1, GRPO+DIV).

    d_i = (N / |cluster of i| - 1) / (N - 1), from 0 where all agree to 1 for a cluster of one. A generation in
    `DEGENERATE_CLUSTER` gets d_i = 0, our choice: a rare kind of gibberish must not be paid for being rare.

    Raises:
      ValueError: on NaN rewards (seen outside jit only); on mismatched shapes.
    """
    _, num_generations = _check_features(rewards=rewards, clusters=clusters)
    clusters = jnp.asarray(clusters)
    rarity = (num_generations / _same_cluster(clusters).sum(axis=-1) - 1) / max(num_generations - 1, 1)
    bonus = jnp.where(clusters == DEGENERATE_CLUSTER, 0.0, rarity)
    return _centred(jnp.asarray(rewards) + div_coef * bonus)


def _means_given_generation(
    rewards: Float[Array | np.ndarray, "P N"], clusters: Int[Array | np.ndarray, "P N"], set_size: int
) -> tuple[Float[Array, "P N"], Float[Array, "P N"], Float[Array, "P N"]]:
    """E[f | y in G], E[mean reward | y in G] and E[diversity | y in G] over all sets G of n that hold y.

    A set's other members are a uniform draw from the other generations, so the chance that it misses a cluster is
    hypergeometric. By linearity over clusters c and members i,
      E[#clusters | y] = sum_c 1 - P(c missed | y)
      E[sum_i r_i * #clusters | y] = r_y E[#clusters | y] + (n-1)/(N-1) sum_{i != y} r_i E[#clusters | y, i]
    where P(c missed) = 0 for the clusters of y and i. The code lets all clusters be missed by the free members, then
    adds back the chance for the clusters that y and i make certain.
    """
    _, num_generations = _check_features(rewards=rewards, clusters=clusters)
    check_set_size(num_generations, set_size)
    rewards, clusters = jnp.asarray(rewards, float), jnp.asarray(clusters)

    same = _same_cluster(clusters)
    sizes = same.sum(axis=-1)
    is_attempt = clusters != DEGENERATE_CLUSTER
    share = is_attempt / sizes  # adds up to 1 over each cluster, so a sum over generations is a sum over clusters

    def missed_and_found(num_fixed: int) -> tuple[Array, Array]:
        """P(missed) of each generation's cluster and the expected number found, by all but the fixed members."""
        table = _miss_probabilities(num_generations, set_size, num_fixed)
        missed = jnp.where(is_attempt, jnp.asarray(table, rewards.dtype)[sizes], 0)
        return missed, (share * (1 - missed)).sum(axis=-1, keepdims=True)

    missed, found = missed_and_found(num_fixed=1)
    num_clusters = found + missed

    missed, found = missed_and_found(num_fixed=2)
    other_rewards = rewards.sum(axis=-1, keepdims=True) - rewards
    # A second member's cluster counts as certain only where it is not already the first one's.
    from_second = jnp.where(same, 0, (rewards * missed)[:, None, :]).sum(axis=-1)
    pair_chance = (set_size - 1) / (num_generations - 1)
    score = rewards * num_clusters + pair_chance * (other_rewards * (found + missed) + from_second)
    return score / set_size**2, (rewards + pair_chance * other_rewards) / set_size, num_clusters / set_size


@functools.cache
def _miss_probabilities(num_generations: int, set_size: int, num_fixed: int) -> Float[np.ndarray, " sizes"]:
    """Chance that a set's free members miss a cluster of s = 0..N generations: C(pool - s, free) / C(pool, free).

    Exact integers until the last division: for large N the binomials overflow any float.
    """
    pool, free = num_generations - num_fixed, max(set_size - num_fixed, 0)
    total = math.comb(pool, free)
    return np.array([math.comb(max(pool - s, 0), free) / total for s in range(num_generations + 1)])


def _same_cluster(clusters: Array) -> Array:
    return clusters[:, :, None] == clusters[:, None, :]


def _centred(values: Array) -> Array:
    return values - values.mean(axis=-1, keepdims=True)


def _check_features(**features: Array | np.ndarray) -> tuple[int, int]:
    """Returns the (P, N) that all features share."""
    shapes = {name: feature.shape[:2] for name, feature in features.items()}
    if len(set(shapes.values())) != 1 or min(map(len, shapes.values())) < 2:
        raise ValueError(f"Features must share their leading [P, N] shape, but have {shapes}.")
    for name, feature in features.items():
        if not isinstance(feature, Tracer) and np.isnan(feature).any():
            raise ValueError(f"{name} hold NaN: give every generation a number, 0 for one that could not be scored.")
    num_prompts, num_generations = set(shapes.values()).pop()
    return num_prompts, num_generations
