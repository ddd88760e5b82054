"""Compares methods by the reward and the distinct correct strategies in 8 responses after training a softmax policy.

A policy has a preference logit and a skill for each strategy. The skill is the logit of the strategy's success rate. In
the first world, skills are fixed, and strategies with a low success rate reduce the reward. No policy is beyond the
Pareto frontier, which is computed without any method. In the second world, skills are learned too, and the policy
initially has the highest skill in the strategies that it prefers.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from poly_epo_jax import set_rl
from poly_epo_jax.set_rl.groups import rarity, subtract_mean

NUM_GENERATIONS, NUM_GROUPS, NUM_SEEDS = 8, 64, 3
STEPS, RATE = 1500, 0.03
DIV_COEFS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 4.0)
SET_SIZES = (2, 3, 4, 5, 6, 7)


class Policy(NamedTuple):
    """A softmax policy over S strategies.

    Attributes:
      preference: Logits of the strategies [S].
      skill: Logits of their success rates [S].
    """

    preference: jax.Array
    skill: jax.Array


def given_skills() -> Policy:
    """Returns the initial policy of the world with fixed skills: uniform, with different success rates."""
    success = jnp.linspace(0.95, 0.25, 8)
    return Policy(jnp.zeros(8), jnp.log(success / (1 - success)))


def learnt_skills() -> Policy:
    """Returns the initial policy of the world with learned skills, whose rarer strategies have lower success rates."""
    return Policy(-jnp.arange(8.0) / 1.5, jnp.linspace(1.5, -3.0, 8))


def methods() -> dict[str, Callable]:
    """Returns the methods by name: functions (rewards, strategies, lambda) -> advantages.

    GRPO+DIV with lambda 0 is GRPO.
    """

    def shaped(rewards: jax.Array, clusters: jax.Array, diversity_coef: jax.Array) -> jax.Array:
        return set_rl.grpo_advantages(rewards) + diversity_coef * subtract_mean(rarity(clusters))

    def product_alone(rewards: jax.Array, clusters: jax.Array, _: jax.Array) -> jax.Array:
        return set_rl.exploration_exploitation_synergy(rewards, clusters, 4).product

    return (
        {"GRPO+DIV": shaped}
        | {f"Poly-EPO, n = {n}": lambda r, c, _, n=n: set_rl.polychromic_advantages(r, c, n) for n in SET_SIZES}
        | {
            "without its covariance": product_alone,
            "sum over sets": lambda r, c, _: set_rl.reward_plus_diversity_advantages(r, c, 4),
            "r d of one": lambda r, c, _: set_rl.shaped_product_advantages(r, c),
        }
    )


def run() -> list[dict]:
    """Trains each method in both worlds.

    Returns:
      For each method and world, mean and range over seeds, and the change in the last fifth of the steps.
    """
    worlds = jax.tree.map(lambda *both: jnp.stack(both), given_skills(), learnt_skills())
    rows = []
    for method, advantages in methods().items():
        div_coefs = DIV_COEFS if method == "GRPO+DIV" else (0.0,)
        of_seeds = jax.vmap(functools.partial(_train, advantages), (None, None, None, 0))
        of_worlds = jax.vmap(of_seeds, (0, 0, None, None))
        train = jax.jit(jax.vmap(of_worlds, (None, None, 0, None)))
        keys = jax.random.split(jax.random.key(0), NUM_SEEDS)
        reward, distinct = map(np.asarray, train(worlds, jnp.array([0.0, 1.0]), jnp.array(div_coefs), keys))
        for i, diversity_coef in enumerate(div_coefs):
            for j, world in enumerate(("given skills", "learnt skills")):
                name = "GRPO" if len(div_coefs) > 1 and not diversity_coef else method
                name += f", {diversity_coef:g}" if diversity_coef else ""
                ended = distinct[i, j, :, -1]
                rows.append(
                    {"world": world, "method": name, "reward": reward[i, j, :, -1].mean(), "distinct": ended.mean()}
                    | {"lowest": ended.min(), "highest": ended.max()}
                    | {"late change": np.abs(ended - distinct[i, j, :, int(0.8 * STEPS)]).max()}
                )
    return rows


def edge() -> list[dict]:
    """Computes the Pareto frontier of reward and distinct correct strategies for policies with fixed skills."""
    success = jax.nn.sigmoid(given_skills().skill)

    def lost(preference: jax.Array, weight: jax.Array) -> jax.Array:
        reward, distinct = scores(Policy(preference, given_skills().skill))
        return -(reward + weight * distinct)

    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, 2000))

    def best(weight: jax.Array) -> jax.Array:
        def step(carry: tuple, _: None) -> tuple[tuple, None]:
            preference, state = carry
            updates, state = optimizer.update(jax.grad(lost)(preference, weight), state)
            return (preference + updates, state), None

        start = jnp.log(success) * 2
        return jax.lax.scan(step, (start, optimizer.init(start)), None, 2000)[0][0]

    found = jax.vmap(best)(jnp.geomspace(0.01, 3.0, 16))
    reward, distinct = jax.vmap(lambda preference: scores(Policy(preference, given_skills().skill)))(found)
    return [{"reward": float(r), "distinct": float(d)} for r, d in zip(reward, distinct, strict=True)]


def scores(policy: Policy) -> tuple[jax.Array, jax.Array]:
    """Returns the exact mean reward and expected number of distinct correct strategies in 8 responses."""
    correct = jax.nn.softmax(policy.preference) * jax.nn.sigmoid(policy.skill)
    return correct.sum(), (1 - (1 - correct) ** 8).sum()


def _train(
    advantages_of: Callable, start: Policy, learns_skill: jax.Array, diversity_coef: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Trains a policy, and returns its scores [STEPS] after each step."""
    optimizer = optax.adam(optax.linear_schedule(RATE, 0.02 * RATE, STEPS))

    def step(carry: tuple, key: jax.Array) -> tuple[tuple, tuple[jax.Array, jax.Array]]:
        policy, state = carry
        strategy_key, success_key = jax.random.split(key)
        strategy = jax.random.categorical(strategy_key, policy.preference, shape=(NUM_GROUPS, NUM_GENERATIONS))
        correct = jax.random.bernoulli(success_key, jax.nn.sigmoid(policy.skill)[strategy])
        advantages = advantages_of(correct.astype(float), strategy, diversity_coef)

        def loss(policy: Policy) -> jax.Array:
            signed = jnp.where(correct, policy.skill[strategy], -policy.skill[strategy])
            return -(advantages * (jax.nn.log_softmax(policy.preference)[strategy] + jax.nn.log_sigmoid(signed))).mean()

        grads = jax.grad(loss)(policy)
        updates, state = optimizer.update(grads._replace(skill=learns_skill * grads.skill), state)
        policy = Policy(*optax.apply_updates(policy, updates))
        return (policy, state), scores(policy)

    return jax.lax.scan(step, (start, optimizer.init(start)), jax.random.split(key, STEPS))[1]
