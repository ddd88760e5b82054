"""From the `algo` section of a configuration to functions: the advantages of a batch, and the loss of its tokens."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from poly_epo_jax import set_rl
from poly_epo_jax.config import AlgoSection
from poly_epo_jax.registry import Registry

Features = Mapping[str, jax.Array | np.ndarray]
"""Of P prompts with N generations each, [P, N, ...] by name: see features.py."""

OWN_FEATURES = ("rewards", "lengths", "mean_logprob")
"""Those that every generation has; all others are the judge's."""


class Estimator(NamedTuple):
    """An advantage estimator, as the configuration has set it up.

    `advantages` maps a random key and the features that `reads` names to advantages [P, N]; the key is another one for
    every step. `title` is the method's name in reports.
    """

    advantages: Callable[[jax.Array, Features], jax.Array]
    reads: tuple[str, ...]
    title: str

    @property
    def reads_judge(self) -> bool:
        """Whether a prompt that the judge failed on has no advantages; else the judge is for logging only."""
        return not set(self.reads) <= set(OWN_FEATURES)


def make_estimator(algo: AlgoSection) -> Estimator:
    """The estimator that `algo.advantages` names, with `algo.options`."""
    return ADVANTAGES[algo.advantages](algo, **algo.options)


def method_title(algo: AlgoSection) -> str:
    """What reports call the method."""
    return make_estimator(algo).title


def make_advantages(algo: AlgoSection, seed: int) -> Callable[[int, Features], np.ndarray]:
    """(step, features) -> advantages [P, N] by the estimator that `algo.advantages` names, compiled.

    Raises, when called:
      ValueError: the estimator reads a feature that is not there, or gives an advantage that is not finite.
    """
    estimator = make_estimator(algo)
    compiled = jax.jit(estimator.advantages)

    def advantages(step: int, features: Features) -> np.ndarray:
        missing = [name for name in estimator.reads if name not in features]
        if missing:
            raise ValueError(
                f"{estimator.title} reads {missing[0]!r}, but a batch has {', '.join(sorted(features))}; use a judge "
                "that adds it, or another algo.advantages or algo.objective."
            )
        key = jax.random.fold_in(jax.random.key(seed), step)
        values = np.asarray(compiled(key, {name: features[name] for name in estimator.reads}))
        if not np.isfinite(values).all():
            (row, *_), *_ = np.argwhere(~np.isfinite(values))
            raise ValueError(
                f"{estimator.title} gives an advantage that is not finite, to prompt {row} of step {step}; correct "
                "algo.advantages or algo.objective, or the keys that it reads."
            )
        return values

    return advantages


def make_loss(algo: AlgoSection) -> set_rl.Loss:
    """The loss that `algo.loss` names; its keywords are bound to the keys of `algo` that have their names."""
    loss = set_rl.LOSSES[algo.loss]
    return partial(loss, **{name: algo[name] for name in inspect.signature(loss).parameters if name in algo})


def _marginal_set(algo: AlgoSection) -> Estimator:
    objective, n, num_sets = set_rl.OBJECTIVES[algo.objective], algo.set_size, algo.num_sets
    closed_form = objective.closed_form
    if closed_form is not None and not num_sets:

        def advantages(key: jax.Array, features: Features) -> jax.Array:
            return closed_form(**features, set_size=n)

    else:

        def advantages(key: jax.Array, features: Features) -> jax.Array:
            prompts, generations = next(iter(features.values())).shape[:2]
            if num_sets:
                draw = partial(set_rl.sample_sets, num_generations=generations, set_size=n, num_sets=num_sets)
                sets = jax.vmap(draw)(jax.random.split(key, prompts))
            else:
                sets = set_rl.enumerate_sets(generations, n)
            return set_rl.marginal_set_advantages(objective.score, sets, **features)

    return Estimator(advantages, set_rl.features_read(objective.score), objective.title)


def _grpo(algo: AlgoSection) -> Estimator:
    return Estimator(lambda key, features: set_rl.grpo_advantages(features["rewards"]), ("rewards",), "GRPO")


def _grpo_div(algo: AlgoSection) -> Estimator:
    return Estimator(
        lambda key, features: set_rl.grpo_div_advantages(**features, div_coef=algo.div_coef),
        ("rewards", "clusters"),
        "GRPO+DIV",
    )


ADVANTAGES: Registry[Callable[..., Estimator]] = Registry(marginal_set=_marginal_set, grpo=_grpo, grpo_div=_grpo_div)
"""By name, what makes an estimator of the `algo` section. Further arguments are `algo.options`."""
