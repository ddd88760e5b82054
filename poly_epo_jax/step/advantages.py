"""Turns the `algo` section of a configuration into functions: the advantages of a batch and the loss of its tokens."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Shaped

from poly_epo_jax import set_rl
from poly_epo_jax.config.checks import Range
from poly_epo_jax.config.keys import AlgoSection
from poly_epo_jax.types import Clustering, Generation, GradedGroup, Registry

Features = Mapping[str, jax.Array | np.ndarray]
"""Arrays [P, N, ...] by name, for P prompts with N generations each."""

OWN_FEATURES = ("rewards", "lengths", "mean_logprob")
"""The features that every generation has; all others come from the judge."""
FEATURES = (*OWN_FEATURES, "clusters", "embeddings")


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


CLIP_RANGE = ("clip_low", "clip_high")
"""Keys of the `algo` section that are passed to losses with parameters of these names."""


def make_loss(algo: AlgoSection) -> set_rl.Loss:
    """Returns the loss selected by `algo.loss`, with its clip range and `algo.loss_options` bound."""
    loss = set_rl.LOSSES[algo.loss]
    clip_range = {name: algo[name] for name in CLIP_RANGE if name in inspect.signature(loss).parameters}
    return partial(loss, **clip_range, **algo.loss_options)


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


def _maker(
    advantages: Callable[..., jax.Array], title: str, least: Callable[..., int] = lambda **_: 1, **options: Any
) -> Callable[..., Estimator]:
    """Makes an entry of ADVANTAGES from a function of features, which its first parameters name, and of options.

    Args:
      least: the fewest generations of a prompt, by the options.
      options: each option's default and range.
    """
    reads = tuple(name for name in set_rl.features_read(advantages) if name in FEATURES)

    def make(algo: AlgoSection, **given: int | float) -> Estimator:
        numbers = {name: given.get(name, default) for name, (default, _) in options.items()}

        def of_batch(key: jax.Array, features: Features) -> jax.Array:
            return advantages(*(features[name] for name in reads), **numbers)

        return Estimator(of_batch, reads, title, least(**numbers))

    parameters = [inspect.Parameter("algo", inspect.Parameter.POSITIONAL_OR_KEYWORD)] + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=Annotated[type(value), check])
        for name, (value, check) in options.items()
    ]
    make.__signature__ = inspect.Signature(parameters)  # which config/options.py reads
    return make


def _grpo_div(algo: AlgoSection) -> Estimator:
    return _maker(set_rl.grpo_div_advantages, "GRPO+DIV", div_coef=(algo.div_coef, Range(0, 1000)))(algo)


ADVANTAGES: Registry[Callable[..., Estimator]] = Registry(
    marginal_set=_marginal_set,
    grpo=_maker(set_rl.grpo_advantages, "GRPO"),
    grpo_div=_grpo_div,
    shaped_product=_maker(set_rl.shaped_product_advantages, "Reward x diversity"),
    passk=_maker(set_rl.passk_advantages, "Pass@k training", lambda k: k + 1, k=(4, Range(1, 4095))),
    pkpo=_maker(set_rl.pkpo_advantages, "PKPO", lambda k: k, k=(4, Range(2, 4096))),
    max_rl=_maker(set_rl.max_rl_advantages, "MaxRL"),
    rs_grpo=_maker(set_rl.rs_grpo_advantages, "RS-GRPO", beta=(2.0, Range(0.01, 100))),
    entropic=_maker(set_rl.entropic_advantages, "Entropic", kl=(math.log(2), Range(0.001, 10))),
    darling=_maker(set_rl.darling_advantages, "DARLING"),
    uniqueness=_maker(set_rl.uniqueness_advantages, "Uniqueness-aware", alpha=(1.0, Range(0, 10))),
    unlikeliness=_maker(set_rl.unlikeliness_advantages, "Unlikeliness", beta=(0.25, Range(0, 1))),
    ucpo=_maker(set_rl.ucpo_advantages, "UCPO", tau=(0.3, Range(0, 1))),
    rep_exp=_maker(set_rl.rep_exp_advantages, "RepExp", beta=(0.01, Range(0, 100)), ridge=(0.01, Range(1e-6, 1e6))),
    dqo=_maker(set_rl.dqo_advantages, "DQO", weight=(1.0, Range(0, 100))),
    set_dpp=_maker(set_rl.set_dpp_advantages, "Set DPP", scale=(1.0, Range(0.001, 100))),
    set_po=_maker(set_rl.set_po_advantages, "SetPO", weight=(1.0, Range(0, 100))),
)
"""By name, functions that make an estimator from the `algo` section. Their further arguments are `algo.options`."""


def batch_features(groups: Sequence[GradedGroup]) -> dict[str, Shaped[np.ndarray, "P N ..."]]:
    """Builds the named feature arrays of P groups with N generations each.

    Args:
      groups: At least one group.

    Returns:
      rewards: The task's rewards, in [0, 1].
      lengths: Number of tokens that the policy generated.
      mean_logprob: Mean log-probability of these tokens under the sampling policy, in nats.
      clusters: Cluster ids. Only present if every group has them.
      Further features of the judge, if every group has a clustering, under the judge's names.

    Raises:
      ValueError: If the judge added a feature to only some groups, or under a reserved name.
    """
    generations = [group.group.generations for group in groups]
    features = {
        "rewards": np.array([group.rewards for group in groups], np.float32),
        "lengths": np.array([[y.loss_mask.sum() for y in row] for row in generations], np.int32),
        "mean_logprob": np.array([[_mean_logprob(y) for y in row] for row in generations], np.float32),
    }
    clusterings = [group.clustering for group in groups if isinstance(group.clustering, Clustering)]
    if len(clusterings) < len(groups):
        return features
    features["clusters"] = np.array([clustering.ids for clustering in clusterings], np.int32)
    for name in sorted({name for clustering in clusterings for name in clustering.features}):
        if name in features or not all(name in clustering.features for clustering in clusterings):
            raise ValueError(
                f"The judge's feature {name!r} is missing from some groups or has a reserved name; add it to every "
                f"group, and do not name it {', '.join(sorted(features))}."
            )
        features[name] = np.stack([clustering.features[name] for clustering in clusterings])
    return features


def _mean_logprob(generation: Generation) -> float:
    return float(generation.logprobs[generation.loss_mask].mean())
