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
from jaxtyping import Float, Int, Shaped

from poly_epo_jax.set_rl.groups import centred, check_features, cluster_sizes, rarity, same_cluster
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
    if none does.

    Args:
      objective: f, maps gathered features [K, n, ...] of one prompt to scores [K]; see `objectives`. It gets the
        features that its parameters name.
      sets: generation indices, shared by all prompts or one [K, n] table per prompt.
      **features: of each of the N generations of P prompts: rewards, clusters, or your own.

    Raises:
      ValueError: features that hold NaN (detected outside jit only) or disagree on [P, N]; a missing feature that the
        objective names; sets of another shape or as large as N; an objective that does not return one score per set.
    """
    num_prompts, num_generations = check_features(**features)
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

    Equal to `marginal_set_advantages(polychromic, enumerate_sets(N, n), ...)` in O(P N^2), whatever C(N, n) is, and
    more exact: no large terms cancel, even where n is close to N and advantages are small.

    Raises:
      ValueError: unless 1 <= set_size < N; on NaN rewards (detected outside jit only); on mismatched shapes.
    """
    return _effects(rewards, clusters, set_size).score


def reward_plus_diversity_advantages(
    rewards: Float[Array | np.ndarray, "P N"], clusters: Int[Array | np.ndarray, "P N"], set_size: int
) -> Float[Array, "P N"]:
    """Marginal set advantages of `reward_plus_diversity` over all C(N, n) sets, without forming a set.

    Raises:
      ValueError: as `polychromic_advantages`.
    """
    on = _effects(rewards, clusters, set_size)
    return on.reward + on.diversity


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
    on = _effects(rewards, clusters, set_size)
    product = on.mean_reward * on.diversity + on.mean_diversity * on.reward + on.reward * on.diversity
    return Synergy(product, on.score - product)


def grpo_advantages(rewards: Float[Array | np.ndarray, "P N"]) -> Float[Array, "P N"]:
    """Reward above the prompt's mean, A_i = r_i - mean r, not divided by a standard deviation (paper appendix).

    Raises:
      ValueError: on NaN rewards (detected outside jit only).
    """
    check_features(rewards=rewards)
    return centred(jnp.asarray(rewards))


def grpo_div_advantages(
    rewards: Float[Array | np.ndarray, "P N"], clusters: Int[Array | np.ndarray, "P N"], div_coef: float
) -> Float[Array, "P N"]:
    """GRPO with a bonus for small clusters: centred r_i + lambda d_i (paper §6.1, GRPO+DIV).

    d_i is `rarity`: from 0 where all agree to 1 for a cluster of one, and 0 for a generation in `DEGENERATE_CLUSTER`.
    This is also the reward shaping of §5, with which the paper compares the polychromic objective.

    Raises:
      ValueError: on NaN rewards (detected outside jit only); on mismatched shapes.
    """
    check_features(rewards=rewards, clusters=clusters)
    return centred(jnp.asarray(rewards) + div_coef * rarity(jnp.asarray(clusters)))


class _Effects(NamedTuple):
    """The effect of a generation y on the sets G of n that hold it: E[. | y in G] - E[.] of a set's score f, its mean
    reward R and its diversity d, each [P, N]; and E[R] and E[d] themselves, each [P, 1]."""

    score: Array
    reward: Array
    diversity: Array
    mean_reward: Array
    mean_diversity: Array


def _effects(
    rewards: Float[Array | np.ndarray, "P N"], clusters: Int[Array | np.ndarray, "P N"], set_size: int
) -> _Effects:
    """The effects over all sets of n, from the chances that a set holding y misses a cluster of s other generations.

    Let missed(s) be that chance, beside(s) the chance that such a set misses the cluster and holds one given other
    generation, and apart(s) the chance that it misses both. Let r' be the rewards above their mean r. By linearity over
    clusters c and members i, and up to terms that all y share, with s the size of y's own cluster,
      n d = missed(s)
      n^2 f = n r missed(s) + r'_y (sum_c [apart(0) - apart(|c|)] + apart(s)) - beside(s) sum_{i in y's cluster} r'_i
    where degenerate clusters contribute nothing. None of the terms is a small difference of large ones.
    """
    _, num_generations = check_features(rewards=rewards, clusters=clusters)
    check_set_size(num_generations, set_size)
    rewards, clusters = jnp.asarray(rewards, float), jnp.asarray(clusters)
    same, sizes = same_cluster(clusters), cluster_sizes(clusters)
    table = _chances(num_generations, set_size)
    chances = jnp.where(clusters == DEGENERATE_CLUSTER, 0, jnp.asarray(table, rewards.dtype)[:, sizes])
    missed, apart, beside, found, not_apart = chances

    above = centred(rewards)
    mean_reward = (rewards - above).mean(axis=-1, keepdims=True)
    above_in_cluster = jnp.where(same, above[:, None, :], 0).sum(axis=-1)
    over_clusters = (not_apart / sizes).sum(axis=-1, keepdims=True)  # each cluster's generations share its term
    from_rewards = above * (over_clusters + apart) - beside * above_in_cluster
    from_diversity = centred(missed)
    return _Effects(
        score=(set_size * mean_reward * from_diversity + centred(from_rewards)) / set_size**2,
        reward=above * (table[1, 0] / set_size),
        diversity=from_diversity / set_size,
        mean_reward=mean_reward,
        mean_diversity=((found / sizes).sum(axis=-1, keepdims=True) + missed.mean(axis=-1, keepdims=True)) / set_size,
    )


@functools.cache
def _chances(num_generations: int, set_size: int) -> Float[np.ndarray, "5 sizes"]:
    """By a cluster's size s = 0..N: missed, apart, beside (see `_effects`), 1 - missed and apart(0) - apart.

    Exact integers until the last division: for large N the binomials overflow any float.
    """
    N, n = num_generations, set_size

    def choose(pool: int, drawn: int) -> int:
        return math.comb(pool, drawn) if pool >= 0 and drawn >= 0 else 0

    sets, without_one = choose(N - 1, n - 1), choose(N - 2, n - 1)
    rows = []
    for s in range(N + 1):
        missed, beside = choose(N - 1 - s, n - 1), choose(N - 2 - s, n - 2)
        apart = missed - beside
        rows.append([count / sets for count in (missed, apart, beside, sets - missed, without_one - apart)])
    return np.array(rows).T
