"""From the `algo` section of a configuration to two functions: advantages of a batch, and the loss of its tokens."""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from poly_epo_jax import set_rl
from poly_epo_jax.config import AlgoSection
from poly_epo_jax.set_rl.losses import Loss

Advantages = Callable[[jax.Array, np.ndarray, np.ndarray], jax.Array]
"""(random key, rewards [P, N], clusters [P, N]) -> advantages [P, N]; the key draws the K sets, if not all."""


def make_advantages(algo: AlgoSection) -> Advantages:
    """The advantage estimator that `algo.advantages` names, jitted."""
    return jax.jit(ADVANTAGES[algo.advantages](algo))


def method_title(algo: AlgoSection) -> str:
    """What reports call the method: by its estimator, and for the set estimator by the objective too."""
    titles = {"grpo": "GRPO", "grpo_div": "GRPO+DIV", "marginal_set": "Set RL"}
    if algo.advantages == "marginal_set" and algo.objective == "polychromic":
        return "Poly-EPO"
    title = titles.get(algo.advantages, algo.advantages)
    return f"{title} ({algo.objective})" if algo.advantages == "marginal_set" else title


def make_loss(algo: AlgoSection) -> Loss:
    """The loss that `algo.loss` names, with its clip range bound; the plain policy gradient has none."""
    loss = set_rl.LOSSES[algo.loss]
    if loss is set_rl.policy_gradient_loss:
        return loss
    return partial(loss, clip_low=algo.clip_low, clip_high=algo.clip_high)


def _marginal_set(algo: AlgoSection) -> Advantages:
    objective, n, num_sets = set_rl.OBJECTIVES[algo.objective], algo.set_size, algo.num_sets
    if objective is set_rl.polychromic and not num_sets:
        return lambda key, rewards, clusters: set_rl.polychromic_advantages(rewards, clusters, n)

    def advantages(key, rewards, clusters):
        prompts, generations = rewards.shape
        if num_sets:
            draw = partial(set_rl.sample_sets, num_generations=generations, set_size=n, num_sets=num_sets)
            sets = jax.vmap(draw)(jax.random.split(key, prompts))
        else:
            sets = set_rl.enumerate_sets(generations, n)
        return set_rl.marginal_set_advantages(objective, sets, rewards=rewards, clusters=clusters)

    return advantages


ADVANTAGES: dict[str, Callable[[AlgoSection], Advantages]] = {
    "marginal_set": _marginal_set,
    "grpo": lambda algo: lambda key, rewards, clusters: set_rl.grpo_advantages(rewards),
    "grpo_div": lambda algo: (
        lambda key, rewards, clusters: set_rl.grpo_div_advantages(rewards, clusters, algo.div_coef)
    ),
}
