"""Advantages [P, N] of generations from rewards and clusters [P, N] (paper §3 and §4; baselines of §6).

Where several axes occur, array names end in their axes: P prompts, N generations per prompt, K sets of n generations.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Shaped

from poly_epo_jax.set_rl.groups import (
    Scalars,
    Tensor,
    as_features,
    cluster_sizes,
    described,
    in_kind_of,
    rarity,
    returns_kind_of_input,
    same_cluster,
    subtract_mean,
)
from poly_epo_jax.set_rl.sets import Sets, as_sets, check_set_size
from poly_epo_jax.types import DEGENERATE_CLUSTER

SetObjective = Callable[..., Float[Array, "*prompts K"]]
ClosedForm = Callable[..., Float[Array, "P N"]]


def features_read(function: Callable[..., Array]) -> tuple[str, ...]:
    """Returns the names of the features that an objective reads, which are the names of its parameters."""
    return tuple(inspect.signature(function).parameters)


def marginal_set_advantages(
    objective: SetObjective,
    sets: Sets,
    **features: Shaped[Array | np.ndarray, "P N ..."] | Sequence[Any] | Tensor,
) -> Any:
    """Computes the marginal set advantage of each generation (paper §3, algorithm 1).

    The advantage of a set is A(G) = f(G) - mean of f over the K sets. The marginal set advantage A_marg(y) is the mean
    of A(G) over the constructed sets that contain y, or 0 if no set contains y.

    Args:
      objective: The objective f, which maps gathered features [K, n, ...] of one prompt to scores [K] (see
        `objectives`). The names of its parameters select the features.
      sets: Generation indices, either one [K, n] table for all prompts or one table per prompt.
      **features: Features of the N generations of P prompts by name: rewards, clusters or custom features.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If a feature is invalid (see `as_features`), if a feature that the objective reads is missing, if
        `sets` has an invalid shape or was made for another N, if n >= N, or if the objective does not return an array
        with one score per set.
    """
    return in_kind_of(next(iter(features.values()), None), lambda: _marginal_set_advantages(objective, sets, features))


def _marginal_set_advantages(objective: SetObjective, sets: Sets, features: Mapping[str, Any]) -> Float[Array, "P N"]:
    reads = features_read(objective)
    missing = [name for name in reads if name not in features]
    if missing:
        raise ValueError(f"The objective reads {missing[0]}, which is not among the features {', '.join(features)}.")
    arrays = dict(zip(features, as_features(2, **features), strict=True))
    num_prompts, num_generations = next(iter(arrays.values())).shape[:2]
    table = as_sets(sets, num_prompts, num_generations)

    def one_prompt(sets_Kn: Array, features: dict[str, Array]) -> Array:
        scores_K: Any = objective(**{name: feature[sets_Kn] for name, feature in features.items()})
        if getattr(scores_K, "shape", None) != (len(sets_Kn),):
            raise ValueError(
                f"The objective {getattr(objective, '__name__', type(objective).__name__)} returned "
                f"{described(scores_K)}, but must return one score per set, [K]; return an array."
            )
        advantages_K = subtract_mean(jnp.asarray(scores_K, jnp.result_type(scores_K, float)))
        contains_KN = (sets_Kn[:, :, None] == jnp.arange(num_generations)[None, None, :]).any(axis=1)
        sums_N = jnp.where(contains_KN, advantages_K[:, None], 0).sum(axis=0)
        return sums_N / jnp.maximum(contains_KN.sum(axis=0), 1)

    return jax.vmap(one_prompt, in_axes=(0 if table.ndim == 3 else None, 0))(
        table, {name: arrays[name] for name in reads}
    )


@returns_kind_of_input
def polychromic_advantages(rewards: Scalars, clusters: Scalars, set_size: int) -> Float[Array, "P N"]:
    """Computes the marginal set advantages of the polychromic objective over all C(N, n) sets (paper §4).

    The result equals `marginal_set_advantages(polychromic, enumerate_sets(N, n), ...)`, but takes O(P N^2) operations
    regardless of C(N, n), because no sets are formed. It is also more accurate: large terms never cancel, even if n is
    close to N and the advantages are small.

    Args:
      rewards: Rewards of the N generations of P prompts.
      clusters: Cluster ids of the generations. `DEGENERATE_CLUSTER` adds no diversity.
      set_size: Number n of generations in a set.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If not 1 <= set_size < N, or if a feature is invalid (see `as_features`).
    """
    return _effects(rewards, clusters, set_size).score


@returns_kind_of_input
def reward_plus_diversity_advantages(rewards: Scalars, clusters: Scalars, set_size: int) -> Float[Array, "P N"]:
    """Computes the marginal set advantages of `reward_plus_diversity` over all C(N, n) sets without forming them.

    Args:
      rewards: Rewards of the N generations of P prompts.
      clusters: Cluster ids of the generations. `DEGENERATE_CLUSTER` adds no diversity.
      set_size: Number n of generations in a set.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If not 1 <= set_size < N, or if a feature is invalid (see `as_features`).
    """
    on = _effects(rewards, clusters, set_size)
    return on.reward + on.diversity


class Synergy(NamedTuple):
    """The two terms of the polychromic advantage. Their sum is the advantage.

    Attributes:
      product: Term of the mean reward and the mean diversity.
      synergy: Term of the covariance of reward and diversity.
    """

    product: Float[Array, "P N"]
    synergy: Float[Array, "P N"]


@returns_kind_of_input
def exploration_exploitation_synergy(rewards: Scalars, clusters: Scalars, set_size: int) -> Synergy:
    """Splits the polychromic advantage into product and synergy (paper §5, Exploration-Exploitation Synergy).

    With R the mean reward of a set and d its diversity, over all C(N, n) sets G:
      product = E[R | y in G] E[d | y in G] - E[R] E[d]
      synergy = Cov(R, d | y in G) - Cov(R, d)

    Args:
      rewards: Rewards of the N generations of P prompts.
      clusters: Cluster ids of the generations. `DEGENERATE_CLUSTER` adds no diversity.
      set_size: Number n of generations in a set.

    Returns:
      The two terms of the advantages.

    Raises:
      ValueError: If not 1 <= set_size < N, or if a feature is invalid (see `as_features`).
    """
    on = _effects(rewards, clusters, set_size)
    product = on.mean_reward * on.diversity + on.mean_diversity * on.reward + on.reward * on.diversity
    return Synergy(product, on.score - product)


@returns_kind_of_input
def grpo_advantages(rewards: Scalars) -> Float[Array, "P N"]:
    """Computes GRPO's advantage A_i = r_i - mean r, without dividing by a standard deviation (paper appendix).

    Args:
      rewards: Rewards of the N generations of P prompts.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If `rewards` is invalid (see `as_features`).
    """
    (rewards,) = as_features(rewards=rewards)
    return subtract_mean(rewards)


@returns_kind_of_input
def grpo_div_advantages(rewards: Scalars, clusters: Scalars, diversity_coef: float) -> Float[Array, "P N"]:
    """Computes GRPO's advantage with a bonus for small clusters: centered r_i + lambda d_i (paper §6.1, GRPO+DIV).

    d_i is `rarity`: 0 if all generations share a cluster, 1 for a cluster of one generation, and 0 in
    `DEGENERATE_CLUSTER`. This is also the reward shaping of §5, with which the paper compares its objective.

    Args:
      rewards: Rewards of the N generations of P prompts.
      clusters: Cluster ids of the generations.
      diversity_coef: Coefficient lambda of the bonus.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If a feature is invalid (see `as_features`).
    """
    rewards, clusters = as_features(rewards=rewards, clusters=clusters)
    return subtract_mean(rewards + diversity_coef * rarity(clusters))


class _Effects(NamedTuple):
    """Effects of each generation y on the sets G that contain it.

    Attributes:
      score: E[f | y in G] - E[f], shape [P, N], where f is the score of a set.
      reward: E[R | y in G] - E[R], shape [P, N], where R is the mean reward of a set.
      diversity: E[d | y in G] - E[d], shape [P, N], where d is the diversity of a set.
      mean_reward: E[R], shape [P, 1].
      mean_diversity: E[d], shape [P, 1].
    """

    score: Array
    reward: Array
    diversity: Array
    mean_reward: Array
    mean_diversity: Array


def _effects(rewards: Scalars, clusters: Scalars, set_size: int) -> _Effects:
    """Computes the effects over all sets of n generations in closed form, without forming a set.

    The expectation over sets is linear, so f and d are sums over clusters c and over generations i of products with the
    event "the set contains a member of c". The probabilities of these events are ratios of binomials. For a random set
    that contains y, and a cluster of s generations without y,
      missed(s) is the probability that the set contains no member of the cluster,
      beside(s) is the probability that it contains no member, but a given other generation outside the cluster,
      apart(s) = missed(s) - beside(s) is the probability that it contains neither.
    Let r be the mean reward, r' the rewards minus r, and s the size of y's own cluster. Up to terms that are equal for
    all y, the expectations D of d and F of f over the sets that contain y are
      n D = missed(s)
      n^2 F = n r missed(s) + r'_y (sum_c [apart(0) - apart(|c|)] + apart(s)) - beside(s) sum_{i in y's cluster} r'_i
    and degenerate clusters contribute 0. No term is a small difference of large terms, so float32 suffices.
    """
    rewards_PN, clusters_PN = as_features(rewards=rewards, clusters=clusters)
    rewards_PN, num_generations = jnp.asarray(rewards_PN, float), rewards_PN.shape[1]
    check_set_size(num_generations, set_size)
    same_PNN, sizes_PN = same_cluster(clusters_PN), cluster_sizes(clusters_PN)
    table = _chances(num_generations, set_size)  # [5, N + 1], by cluster size
    chances = jnp.where(clusters_PN == DEGENERATE_CLUSTER, 0, jnp.asarray(table, rewards_PN.dtype)[:, sizes_PN])
    missed_PN, apart_PN, beside_PN, found_PN, not_apart_PN = chances

    above_PN = subtract_mean(rewards_PN)
    mean_reward_P1 = (rewards_PN - above_PN).mean(axis=-1, keepdims=True)
    above_in_cluster_PN = jnp.where(same_PNN, above_PN[:, None, :], 0).sum(axis=-1)
    # Each generation adds the term of its cluster divided by the cluster's size, so these are sums over clusters.
    over_clusters_P1 = (not_apart_PN / sizes_PN).sum(axis=-1, keepdims=True)
    found_P1 = (found_PN / sizes_PN).sum(axis=-1, keepdims=True)
    from_rewards_PN = above_PN * (over_clusters_P1 + apart_PN) - beside_PN * above_in_cluster_PN
    from_diversity_PN = subtract_mean(missed_PN)
    return _Effects(
        score=(set_size * mean_reward_P1 * from_diversity_PN + subtract_mean(from_rewards_PN)) / set_size**2,
        reward=above_PN * (table[1, 0] / set_size),
        diversity=from_diversity_PN / set_size,
        mean_reward=mean_reward_P1,
        mean_diversity=(found_P1 + missed_PN.mean(axis=-1, keepdims=True)) / set_size,
    )


@functools.cache
def _chances(num_generations: int, set_size: int) -> Float[np.ndarray, "5 sizes"]:
    """Tabulates missed, apart, beside (see `_effects`), 1 - missed and apart(0) - apart for cluster sizes s = 0..N.

    Counts are exact integers until the final division, because the binomials overflow floats for large N.
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
