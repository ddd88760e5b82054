"""Builds the functions that the `algo` section configures: the advantage estimator of a batch and the token loss."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Shaped, UInt32

from poly_epo_jax import set_rl
from poly_epo_jax.config.keys import AlgoSection, ConfigError
from poly_epo_jax.parallel.compiler_options import Jit
from poly_epo_jax.registry import Range, Registry
from poly_epo_jax.rollouts.groups import generation_seeds
from poly_epo_jax.set_rl.groups import described
from poly_epo_jax.step.objective import checked_loss
from poly_epo_jax.system.text import first_line
from poly_epo_jax.system.user_code import user_line
from poly_epo_jax.types import Clustering, GradedGroup, Problem

Features = Mapping[str, jax.Array | np.ndarray]
"""Feature arrays of shape [P, N, ...] by name, for P prompts with N generations each."""

AdvantageFunction = Callable[[int, Sequence[Problem], Features], np.ndarray]
"""Function (step, problems, features) -> advantages [P, N] of P problems, see `make_advantages`."""

ZERO = 1e-6
"""Absolute advantages up to this value count as 0, because the estimators compute in float32."""

OWN_FEATURES = ("rewards", "lengths", "mean_logprob")
"""Features that every generation has. All other features come from the judge."""
_INTEGERS = ("lengths", "clusters")
FEATURES = (*OWN_FEATURES, "clusters", "embeddings")
"""Names of the features that the estimators created by `_factory` can read. Their other parameters are options."""


class Estimator(NamedTuple):
    """A configured advantage estimator.

    Attributes:
      advantages: Function (key, features) -> advantages [P, N]. `features` holds the arrays that `reads` names.
        Training calls it with P = 1. Each prompt of each step has its own random key.
      reads: Names of the features that `advantages` reads.
      title: Name of the method in reports.
      min_generations: Minimum number of generations per prompt.
    """

    advantages: Callable[[jax.Array, Features], jax.Array]
    reads: tuple[str, ...]
    title: str
    min_generations: int = 1

    @property
    def reads_judge(self) -> bool:
        """True if features of the judge are read. Prompts on which the judge failed are then not trained on."""
        return not set(self.reads) <= set(OWN_FEATURES)


def make_estimator(algo: AlgoSection) -> Estimator:
    """Returns the estimator selected by `algo.advantages`, configured with `algo.options` and `algo.focal_gamma`."""
    estimator = ADVANTAGES[algo.advantages](algo, **algo.options)
    return _focal(estimator, algo.focal_gamma) if algo.focal_gamma else estimator


def _focal(estimator: Estimator, gamma: float) -> Estimator:
    """Multiplies the advantages of a prompt by (1 - r)^gamma, r being its mean reward (F-GRPO, arXiv 2602.06717)."""

    def advantages(key: jax.Array, features: Features) -> jax.Array:
        unweighted = estimator.advantages(key, {name: features[name] for name in estimator.reads})
        return unweighted * (1 - features["rewards"].mean(axis=1, keepdims=True)) ** gamma

    return estimator._replace(
        advantages=advantages,
        reads=tuple(dict.fromkeys((*estimator.reads, "rewards"))),
        title=f"{estimator.title}, focal {gamma:g}",
    )


def method_title(algo: AlgoSection) -> str:
    """Returns the name of the method in reports: that of the estimator and, if set, the use of truncated responses."""
    truncated = {"train": "", "mask": ", truncated masked", "penalize": ", overlong penalty"}
    return make_estimator(algo).title + truncated[algo.truncated]


def make_advantages(algo: AlgoSection, seed: int) -> AdvantageFunction:
    """Compiles the advantage estimator selected by `algo.advantages`.

    Args:
      algo: The `algo` section of the configuration.
      seed: Seed of the estimator's random keys. Each prompt has its own key, derived from the step and the problem.

    Returns:
      A function `(step, problems, features) -> advantages` that maps feature arrays [P, N, ...] of P problems to a
      float array [P, N]. The estimator is called with one prompt at a time, so the advantages of a prompt do not depend
      on the other prompts, to the last bit. The function raises ValueError if a required feature is missing, or if the
      advantages of a prompt have another shape or are not finite.
    """
    estimator = make_estimator(algo)

    @Jit
    def compiled(word: UInt32[jax.Array, ""], features: Features) -> jax.Array:
        return estimator.advantages(jax.random.fold_in(jax.random.key(seed), word), features)

    def advantages(step: int, problems: Sequence[Problem], features: Features) -> np.ndarray:
        if missing := [name for name in estimator.reads if name not in features]:
            raise ValueError(
                f"{estimator.title} requires the feature {missing[0]!r}, but the batch only has "
                f"{', '.join(sorted(features))}; use a judge that provides it, or change algo.advantages or "
                "algo.objective."
            )
        rows = []
        for place, problem in enumerate(problems):
            (word,) = generation_seeds(step, problem, 1)
            values = compiled(word, {name: features[name][place : place + 1] for name in estimator.reads})
            _check_shape(estimator, values, next(iter(features.values())).shape[1])
            if not np.isfinite(values).all():
                raise ValueError(
                    f"{estimator.title} computed a non-finite advantage for problem {problem.id!r} of step {step}; "
                    "correct the function of algo.advantages or algo.objective, or its options."
                )
            rows.append(np.asarray(values))
        return np.concatenate(rows)

    return advantages


def _check_shape(estimator: Estimator, returned: Any, num_generations: int) -> None:
    if getattr(returned, "shape", None) != (expected := (1, num_generations)):
        raise ConfigError(
            f"{estimator.title} returned {described(returned)} instead of advantages of shape {expected}; correct the "
            "function of algo.advantages or algo.objective so that it returns an array with one advantage per "
            "generation."
        )


def check_estimator(algo: AlgoSection, num_generations: int) -> None:
    """Traces the estimator on one prompt, so that mistakes in a user's function are reported at the start.

    Estimators that read other features than rewards, lengths, log-probabilities and clusters are not checked.

    Raises:
      ValueError: If the code of a user raises an exception, if an objective does not return one score per set, or if
        the result is not an array with the shape of the rewards.
    """
    estimator = ADVANTAGES[algo.advantages](algo, **algo.options)  # without the factor of `algo.focal_gamma`
    if not set(estimator.reads) <= {*OWN_FEATURES, "clusters"}:
        return
    features = {
        name: jax.ShapeDtypeStruct((1, num_generations), np.int32 if name in _INTEGERS else np.float32)
        for name in estimator.reads
    }
    traced = _traced(
        estimator.title, f"{num_generations} generations", estimator.advantages, jax.random.key(0), features
    )
    _check_shape(estimator, traced, num_generations)


def check_loss(algo: AlgoSection) -> None:
    """Traces the loss on one row of tokens, so that mistakes in a user's function are reported at the start.

    Raises:
      ConfigError: If the code of a user raises an exception, or the loss does not return a scalar and a dictionary of
        metrics, see `checked_loss`.
    """
    subject, loss = f"algo.loss={algo.loss!r}", make_loss(algo)
    floats, ids = (jax.ShapeDtypeStruct((1, 128), dtype) for dtype in (np.float32, np.int32))
    tokens = set_rl.Tokens(floats, floats, floats, floats, ids)  # pyright: ignore[reportArgumentType]
    _traced(subject, "128 tokens", lambda tokens: checked_loss(loss(tokens), subject), tokens)


def _traced(subject: str, given: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the shapes of the results of a function of a user.

    Args:
      subject: Name of the function in the error message.
      given: Size of the arguments in the error message.
      function: The function.
      *arguments: Its arguments, or their shapes.

    Raises:
      ConfigError: If the code of a user raises an exception.
    """
    try:
        return jax.eval_shape(function, *arguments)
    except Exception as error:
        if not (line := user_line(error)):
            raise
        raise ConfigError(
            f"{subject} raised {type(error).__name__} for {given}{line}: {first_line(error)} Objectives, advantage "
            "estimators and losses are compiled by JAX: use functions of jax.numpy instead of NumPy, and jnp.where "
            "instead of if."
        ) from error


def has_signal(advantages: Float[np.ndarray, "P N"]) -> Bool[np.ndarray, " P"]:
    """Returns which of P prompts have an advantage other than 0 and NaN, and therefore affect the policy gradient."""
    return np.nan_to_num(np.abs(advantages)).max(axis=1) > ZERO


CLIP_RANGE = ("clip_low", "clip_high")
"""Keys of the `algo` section that are passed to losses with parameters of the same names."""


def make_loss(algo: AlgoSection) -> set_rl.Loss:
    """Returns the loss selected by `algo.loss`, with its clip range and `algo.loss_options` bound."""
    loss = set_rl.LOSSES[algo.loss]
    clip_range = {name: algo[name] for name in CLIP_RANGE if name in inspect.signature(loss).parameters}
    return partial(loss, **clip_range, **algo.loss_options)


def skips_zero_advantages(algo: AlgoSection) -> bool:
    """Returns True if sequences with advantage 0 contribute nothing to the gradient."""
    return algo.loss in set_rl.ZERO_GRADIENT_AT_ZERO_ADVANTAGE and not (algo.kl_coef or algo.entropy_coef)


def _marginal_set(algo: AlgoSection) -> Estimator:
    objective, n, num_sets = set_rl.OBJECTIVES[algo.objective], algo.set_size, algo.num_sets
    closed_form = objective.closed_form
    if closed_form is not None and not num_sets:
        # The closed form over all C(N, n) sets counts sets with binomials instead of enumerating them.
        def advantages(key: jax.Array, features: Features) -> jax.Array:
            return closed_form(**features, set_size=n)

    else:

        def advantages(key: jax.Array, features: Features) -> jax.Array:
            prompts, generations = next(iter(features.values())).shape[:2]
            if num_sets:  # each prompt draws its own sets, without replacement
                drawn = min(num_sets, math.comb(generations, n))
                draw = partial(set_rl.sample_sets, num_generations=generations, set_size=n, num_sets=drawn)
                sets = jax.vmap(draw)(jax.random.split(key, prompts))
            else:
                sets = set_rl.enumerate_sets(generations, n)
            return set_rl.marginal_set_advantages(objective.score, sets, **features)

    return Estimator(advantages, set_rl.features_read(objective.score), objective.title, n + 1)


def _factory(
    advantages: Callable[..., jax.Array],
    title: str,
    min_generations: Callable[..., int] = lambda **_: 1,
    **options: Any,
) -> Callable[..., Estimator]:
    """Creates an entry of ADVANTAGES from a function of features and options.

    Args:
      advantages: Function whose first parameters have the names of the features that it reads.
      title: Name of the method in reports.
      min_generations: Function that maps the options to the minimum number of generations per prompt.
      options: Default and range of each option.
    """
    reads = tuple(name for name in set_rl.features_read(advantages) if name in FEATURES)

    def factory(algo: AlgoSection, **given: int | float) -> Estimator:
        numbers = {name: given.get(name, default) for name, (default, _) in options.items()}

        def batch_advantages(key: jax.Array, features: Features) -> jax.Array:
            return advantages(*(features[name] for name in reads), **numbers)

        return Estimator(batch_advantages, reads, title, min_generations(**numbers))

    parameters = [inspect.Parameter("algo", inspect.Parameter.POSITIONAL_OR_KEYWORD)] + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=Annotated[type(value), check])
        for name, (value, check) in options.items()
    ]
    factory.__signature__ = inspect.Signature(parameters)  # config/options.py reads the options from it
    return factory


ADVANTAGES: Registry[Callable[..., Estimator]] = Registry(
    marginal_set=_marginal_set,
    grpo=_factory(set_rl.grpo_advantages, "GRPO"),
    grpo_div=lambda algo: _factory(
        set_rl.grpo_div_advantages, "GRPO+DIV", diversity_coef=(algo.diversity_coef, Range(0, 1000))
    )(algo),
    shaped_product=_factory(set_rl.shaped_product_advantages, "Reward x diversity"),
    passk=_factory(set_rl.passk_advantages, "Pass@k training", lambda k: k + 1, k=(4, Range(1, 4095))),
    pkpo=_factory(set_rl.pkpo_advantages, "PKPO", lambda k: k, k=(4, Range(2, 4096))),
    max_rl=_factory(set_rl.max_rl_advantages, "MaxRL"),
    rs_grpo=_factory(set_rl.rs_grpo_advantages, "RS-GRPO", beta=(2.0, Range(0.01, 100))),
    entropic=_factory(set_rl.entropic_advantages, "Entropic", kl=(math.log(2), Range(0.001, 10))),
    darling=_factory(set_rl.darling_advantages, "DARLING"),
    uniqueness=_factory(set_rl.uniqueness_advantages, "Uniqueness-aware", alpha=(1.0, Range(0, 10))),
    unlikeliness=_factory(set_rl.unlikeliness_advantages, "Unlikeliness", beta=(0.25, Range(0, 1))),
    ucpo=_factory(set_rl.ucpo_advantages, "UCPO", tau=(0.3, Range(0, 1))),
    rep_exp=_factory(set_rl.rep_exp_advantages, "RepExp", beta=(0.01, Range(0, 100)), ridge=(0.01, Range(1e-6, 1e6))),
    dqo=_factory(set_rl.dqo_advantages, "DQO", weight=(1.0, Range(0, 100))),
    set_dpp=_factory(set_rl.set_dpp_advantages, "Set DPP", scale=(1.0, Range(0.001, 100))),
    set_po=_factory(set_rl.set_po_advantages, "SetPO", weight=(1.0, Range(0, 100))),
)
"""Estimator factories by name. They take the `algo` section, and `algo.options` as keyword arguments."""


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
      ValueError: If the judge added a feature to only some groups, in different shapes, or under a reserved name.
    """
    generations = [group.group.generations for group in groups]
    features = {
        "rewards": np.array([group.rewards for group in groups], np.float32),
        "lengths": np.array([[y.loss_mask.sum() for y in row] for row in generations], np.int32),
        "mean_logprob": np.array([[y.logprobs[y.loss_mask].mean() for y in row] for row in generations], np.float32),
    }
    clusterings = [group.clustering for group in groups if isinstance(group.clustering, Clustering)]
    if len(clusterings) < len(groups):
        return features
    features["clusters"] = np.array([clustering.ids for clustering in clusterings], np.int32)
    for name in sorted({name for clustering in clusterings for name in clustering.features}):
        shapes = {np.shape(clustering.features.get(name, 0)) for clustering in clusterings}  # () if it is missing
        if name in features or len(shapes) > 1:
            raise ValueError(
                f"The judge's feature {name!r} is missing from some groups, has different shapes or has a reserved "
                f"name; add it to every group in one shape, and do not name it {', '.join(sorted(features))}."
            )
        features[name] = np.stack([clustering.features[name] for clustering in clusterings])
    return features
