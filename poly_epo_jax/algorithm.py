"""Turns the `algo` section of a configuration into functions: the advantages of a batch and the loss of its tokens."""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, NamedTuple

import jax
import numpy as np

from poly_epo_jax import set_rl
from poly_epo_jax.checks import Range
from poly_epo_jax.config import AlgoSection
from poly_epo_jax.registry import Registry

Features = Mapping[str, jax.Array | np.ndarray]
"""Arrays [P, N, ...] by name, for P prompts with N generations each; see features.py."""

OWN_FEATURES = ("rewards", "lengths", "mean_logprob")
"""The features that every generation has; all others come from the judge."""


class Estimator(NamedTuple):
    """An advantage estimator, set up from the configuration.

    `advantages` maps a random key and the features that `reads` names to advantages [P, N]; every step has a key of its
    own. `title` is the method's name in reports. A prompt must have at least `least_generations` generations.
    """

    advantages: Callable[[jax.Array, Features], jax.Array]
    reads: tuple[str, ...]
    title: str
    least_generations: int = 1

    @property
    def reads_judge(self) -> bool:
        """Whether the judge is read: a prompt that it failed on then has no advantages. If not, it is only logged."""
        return not set(self.reads) <= set(OWN_FEATURES)


def make_estimator(algo: AlgoSection) -> Estimator:
    """The estimator that `algo.advantages` names, with `algo.options`."""
    return ADVANTAGES[algo.advantages](algo, **algo.options)


def method_title(algo: AlgoSection) -> str:
    """The method's name in reports."""
    return make_estimator(algo).title


def make_advantages(algo: AlgoSection, seed: int) -> Callable[[int, Features], np.ndarray]:
    """The compiled estimator that `algo.advantages` names: (step, features) -> advantages [P, N].

    Raises, when called:
      ValueError: the estimator reads a missing feature, or returns an advantage that is not finite.
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
    """The loss that `algo.loss` names, with its keyword arguments bound to the keys of `algo` of the same names."""
    loss = set_rl.LOSSES[algo.loss]
    return partial(loss, **{name: algo[name] for name in inspect.signature(loss).parameters if name in algo})


def skips_zero_advantages(algo: AlgoSection) -> bool:
    """Whether sequences with advantage 0 add nothing to the gradient."""
    return algo.loss in set_rl.SILENT_AT_ZERO and not (algo.kl_coef or algo.entropy_coef)


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


def _of_features(
    advantages: Callable[..., jax.Array],
    reads: tuple[str, ...],
    title: str,
    least_generations: int = 1,
    **numbers: int | float,
) -> Estimator:
    """An estimator whose `advantages` takes the features in `reads`, in that order, and `numbers` as keywords."""

    def of_batch(key: jax.Array, features: Features) -> jax.Array:
        return advantages(*(features[name] for name in reads), **numbers)

    return Estimator(of_batch, reads, title, least_generations)


REWARDS = ("rewards",)
CLUSTERS = ("rewards", "clusters")
LIKELIHOOD = ("rewards", "mean_logprob")
EMBEDDINGS = ("rewards", "embeddings")


def _grpo(algo: AlgoSection) -> Estimator:
    return _of_features(set_rl.grpo_advantages, REWARDS, "GRPO")


def _grpo_div(algo: AlgoSection) -> Estimator:
    return _of_features(set_rl.grpo_div_advantages, CLUSTERS, "GRPO+DIV", div_coef=algo.div_coef)


def _shaped_product(algo: AlgoSection) -> Estimator:
    return _of_features(set_rl.shaped_product_advantages, CLUSTERS, "Reward x diversity")


def _passk(algo: AlgoSection, k: Annotated[int, Range(1, 4095)] = 4) -> Estimator:
    return _of_features(set_rl.passk_advantages, REWARDS, "Pass@k training", k + 1, k=k)


def _pkpo(algo: AlgoSection, k: Annotated[int, Range(2, 4096)] = 4) -> Estimator:
    return _of_features(set_rl.pkpo_advantages, REWARDS, "PKPO", k, k=k)


def _max_rl(algo: AlgoSection) -> Estimator:
    return _of_features(set_rl.max_rl_advantages, REWARDS, "MaxRL")


def _rs_grpo(algo: AlgoSection, beta: Annotated[float, Range(0.01, 100)] = 2.0) -> Estimator:
    return _of_features(set_rl.rs_grpo_advantages, REWARDS, "RS-GRPO", beta=beta)


def _entropic(algo: AlgoSection, kl: Annotated[float, Range(0.001, 10)] = math.log(2)) -> Estimator:
    return _of_features(set_rl.entropic_advantages, REWARDS, "Entropic", kl=kl)


def _darling(algo: AlgoSection) -> Estimator:
    return _of_features(set_rl.darling_advantages, CLUSTERS, "DARLING")


def _uniqueness(algo: AlgoSection, alpha: Annotated[float, Range(0, 10)] = 1.0) -> Estimator:
    return _of_features(set_rl.uniqueness_advantages, CLUSTERS, "Uniqueness-aware", alpha=alpha)


def _unlikeliness(algo: AlgoSection, beta: Annotated[float, Range(0, 1)] = 0.25) -> Estimator:
    return _of_features(set_rl.unlikeliness_advantages, LIKELIHOOD, "Unlikeliness", beta=beta)


def _ucpo(algo: AlgoSection, tau: Annotated[float, Range(0, 1)] = 0.3) -> Estimator:
    return _of_features(set_rl.ucpo_advantages, LIKELIHOOD, "UCPO", tau=tau)


def _rep_exp(
    algo: AlgoSection, beta: Annotated[float, Range(0, 100)] = 0.01, ridge: Annotated[float, Range(1e-6, 1e6)] = 0.01
) -> Estimator:
    return _of_features(set_rl.rep_exp_advantages, EMBEDDINGS, "RepExp", beta=beta, ridge=ridge)


def _dqo(algo: AlgoSection, weight: Annotated[float, Range(0, 100)] = 1.0) -> Estimator:
    return _of_features(set_rl.dqo_advantages, EMBEDDINGS, "DQO", weight=weight)


def _set_dpp(algo: AlgoSection, scale: Annotated[float, Range(0.001, 100)] = 1.0) -> Estimator:
    return _of_features(set_rl.set_dpp_advantages, EMBEDDINGS, "Set DPP", scale=scale)


def _set_po(algo: AlgoSection, weight: Annotated[float, Range(0, 100)] = 1.0) -> Estimator:
    return _of_features(set_rl.set_po_advantages, EMBEDDINGS, "SetPO", weight=weight)


ADVANTAGES: Registry[Callable[..., Estimator]] = Registry(
    marginal_set=_marginal_set,
    grpo=_grpo,
    grpo_div=_grpo_div,
    shaped_product=_shaped_product,
    passk=_passk,
    pkpo=_pkpo,
    max_rl=_max_rl,
    rs_grpo=_rs_grpo,
    entropic=_entropic,
    darling=_darling,
    uniqueness=_uniqueness,
    unlikeliness=_unlikeliness,
    ucpo=_ucpo,
    rep_exp=_rep_exp,
    dqo=_dqo,
    set_dpp=_set_dpp,
    set_po=_set_po,
)
"""By name, functions that make an estimator from the `algo` section. Their further arguments are `algo.options`."""
