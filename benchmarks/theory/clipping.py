"""Compares the clipping of PPO and CISPO: gradient weights as a function of the ratio, and their effect on training.

One batch is used for several updates, like off-policy minibatches. All strategies of the policy have the same success
rate. Some of them are rare, and Poly-EPO assigns them a positive advantage.
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
NUM_GROUPS, NUM_GENERATIONS, RARE = 64, 8, 0.05  # RARE is the maximum probability of a rare strategy.
UPDATES, RATE = (1, 2, 4, 8, 16), 0.1
SUCCESS = 0.6
RATIOS = np.linspace(0.405, 1.995, 80)  # No ratio is on a clipping bound, where the derivative does not exist.


def weights() -> list[dict]:
    """Computes the derivative of a token's term with respect to log p at different ratios w, for A = 1 and A = -1."""

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
    """Trains on one batch with each loss."""
    return [row for name in LOSSES for row in _batch(name)]


def _batch(name: str) -> list[dict]:
    """Trains on one batch with Adam.

    Returns:
      A row for each number of updates in `UPDATES`, with the growth of probabilities and the fraction of advantages
      outside PPO's clip range.
    """
    policy = old = jnp.log(0.5) * jnp.arange(8.0)  # Eight strategies, each half as probable as the previous one.
    chances = np.asarray(jax.nn.softmax(old))
    optimizer = optax.adam(RATE)
    state, rng, rows = optimizer.init(policy), np.random.default_rng(0), []
    step = jax.jit(jax.grad(functools.partial(_loss, LOSSES[name])))
    for update in range(1, max(UPDATES) + 1):
        strategy = rng.choice(8, (NUM_GROUPS, NUM_GENERATIONS), p=chances / chances.sum())
        correct = rng.random(strategy.shape) < SUCCESS
        advantages = np.asarray(polychromic()(correct.astype(float), strategy))
        clipped, is_rare = _is_clipped(policy, old, strategy, advantages), chances[strategy] < RARE
        changes, state = optimizer.update(step(policy, old, strategy, advantages), state)
        policy = optax.apply_updates(policy, changes)
        if update in UPDATES:
            growth = np.asarray(jax.nn.softmax(policy)) / chances
            rows.append(
                {"loss": name, "updates": update}
                | {"rare, times": growth[chances < RARE].mean(), "commonest, times": growth[0]}
                | {"outside the range, rare": _clipped_fraction(clipped, is_rare, advantages)}
                | {"outside the range, others": _clipped_fraction(clipped, ~is_rare, advantages)}
            )
    return rows


def _is_clipped(policy: jax.Array, old: jax.Array, strategy: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """Returns True for tokens whose gradient is zero because of PPO's clipping."""
    ratio = np.asarray(jnp.exp(jax.nn.log_softmax(policy) - jax.nn.log_softmax(old)))[strategy]
    return ((ratio > 1.28) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))


def _clipped_fraction(clipped: np.ndarray, of_kind: np.ndarray, advantages: np.ndarray) -> float:
    """Returns the fraction of the absolute advantages of one kind of response that is clipped."""
    return float((np.abs(advantages) * clipped * of_kind).sum() / (np.abs(advantages) * of_kind).sum())


def _loss(loss: Callable, policy: Values, old: Values, strategy: np.ndarray, advantages: np.ndarray) -> jax.Array:
    """Computes the loss of the tokens that select a strategy."""
    logprobs, old_logprobs = (jax.nn.log_softmax(logits)[strategy] for logits in (policy, old))
    ids = jnp.broadcast_to(jnp.arange(1, NUM_GENERATIONS + 1), strategy.shape)
    weights = jnp.full(strategy.shape, 1 / strategy.size)
    return loss(set_rl.Tokens(logprobs, old_logprobs, jnp.asarray(advantages), weights, ids))[0]
