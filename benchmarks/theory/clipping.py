"""PPO's clip and CISPO's: how much of a token's gradient each keeps once its ratio has moved, and what that does.

One batch is taken in several updates, as off-policy minibatches are. The policy's strategies succeed alike, and some of
them are rare, which Poly-EPO pays.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bandit import Values
from shares import polychromic

from poly_epo_jax import set_rl

LOSSES: dict[str, Callable] = {
    "ppo_clip": set_rl.ppo_clip_loss,
    "cispo": set_rl.cispo_loss,
    "policy_gradient": set_rl.policy_gradient_loss,
}
NUM_GROUPS, NUM_GENERATIONS, RARE = 64, 8, 0.05  # groups of a minibatch
UPDATES, RATE = (1, 2, 4, 8, 16), 0.1
SUCCESS = 0.6
RATIOS = np.linspace(0.405, 1.995, 80)  # none on a bound, where a derivative is not one


def weights() -> list[dict]:
    """d term / d log p over the ratio w, for A = 1 and for A = -1: PPO's and CISPO's."""

    def slope(loss: Callable, sign: float) -> np.ndarray:
        def total(logprobs: jax.Array) -> jax.Array:
            ones = jnp.ones_like(logprobs)
            ids = jnp.ones(logprobs.shape, int)
            return -loss(set_rl.Tokens(logprobs, jnp.zeros_like(logprobs), sign * ones, ones, ids))[0]

        return np.asarray(jax.grad(total)(jnp.log(jnp.asarray(RATIOS))))

    columns = {
        f"{name}, A {mark} 0": slope(LOSSES[name], sign)
        for name in ("ppo_clip", "cispo")
        for mark, sign in ((">", 1.0), ("<", -1.0))
    }
    return [{"ratio": ratio} | {name: values[i] for name, values in columns.items()} for i, ratio in enumerate(RATIOS)]


def run() -> list[dict]:
    return [row for name in LOSSES for row in _batch(name)]


def _batch(name: str) -> list[dict]:
    """One batch by Adam, a row after each number of minibatches: how chances have grown, and what PPO held back."""
    policy = old = jnp.log(0.5) * jnp.arange(8.0)  # eight strategies, each half as likely as the one before
    chances = np.asarray(jax.nn.softmax(old))
    optimizer = optax.adam(RATE)
    state, rng, rows = optimizer.init(policy), np.random.default_rng(0), []
    step = jax.jit(jax.grad(functools.partial(_loss, LOSSES[name])))
    for update in range(1, max(UPDATES) + 1):
        strategy = rng.choice(8, (NUM_GROUPS, NUM_GENERATIONS), p=chances / chances.sum())
        right = rng.random(strategy.shape) < SUCCESS
        paid = np.asarray(polychromic()(right.astype(float), strategy))
        held, is_rare = _held_back(policy, old, strategy, paid), chances[strategy] < RARE
        changes, state = optimizer.update(step(policy, old, strategy, paid), state)
        policy = optax.apply_updates(policy, changes)
        if update in UPDATES:
            growth = np.asarray(jax.nn.softmax(policy)) / chances
            rows.append(
                {"loss": name, "updates": update}
                | {"rare, times": growth[chances < RARE].mean(), "commonest, times": growth[0]}
                | {"outside the range, rare": _share(held, is_rare, paid)}
                | {"outside the range, others": _share(held, ~is_rare, paid)}
            )
    return rows


def _held_back(policy: jax.Array, old: jax.Array, strategy: np.ndarray, paid: np.ndarray) -> np.ndarray:
    """Whether PPO's clip would take the token's gradient."""
    ratio = np.asarray(jnp.exp(jax.nn.log_softmax(policy) - jax.nn.log_softmax(old)))[strategy]
    return ((ratio > 1.28) & (paid > 0)) | ((ratio < 0.8) & (paid < 0))


def _share(held: np.ndarray, of_kind: np.ndarray, paid: np.ndarray) -> float:
    """Of the advantages of this kind, by size."""
    return float((np.abs(paid) * held * of_kind).sum() / (np.abs(paid) * of_kind).sum())


def _loss(loss: Callable, policy: Values, old: Values, strategy: np.ndarray, paid: np.ndarray) -> jax.Array:
    """Of the tokens that choose a strategy."""
    logprobs, old_logprobs = (jax.nn.log_softmax(logits)[strategy] for logits in (policy, old))
    ids = jnp.broadcast_to(jnp.arange(1, NUM_GENERATIONS + 1), strategy.shape)
    shares = jnp.full(strategy.shape, 1 / strategy.size)
    return loss(set_rl.Tokens(logprobs, old_logprobs, jnp.asarray(paid), shares, ids))[0]
