"""Validates a user's configuration and builds the typed configuration, task and judge. Shared by all commands.

Sections validate their own keys (config/keys.py). This module checks the names of components against their registries,
options against the signatures of registry entries, and combinations of keys.
"""

import math
import os
import re
from collections.abc import Collection, Mapping
from typing import Any, get_args

from ml_collections import ConfigDict

from poly_epo_jax.config.checks import one_of, validate
from poly_epo_jax.config.keys import (
    BaseSection,
    Config,
    ConfigError,
    JudgeSection,
    TaskSection,
    max_sequence_tokens,
    updates_per_step,
)
from poly_epo_jax.config.options import Entry, check_options
from poly_epo_jax.config.section import read_section
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.model.attention import IMPLEMENTATIONS
from poly_epo_jax.model.transformer import AUTO, REMAT_POLICIES
from poly_epo_jax.parallel.devices import DEVICES
from poly_epo_jax.rollouts import SAMPLERS, WEIGHT_SYNCS
from poly_epo_jax.set_rl import LOSSES, OBJECTIVES
from poly_epo_jax.step.advantages import ADVANTAGES, CLIP_RANGE, make_estimator
from poly_epo_jax.step.optimizer import SCHEDULES
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.types import Interactive, Judge, Rewarded, Task

KNOWN_NAMES: dict[str, Collection[str]] = {
    "task.name": TASKS,
    "judge.name": JUDGES,
    "rollouts.name": SAMPLERS,
    "rollouts.weight_sync": WEIGHT_SYNCS,
    "algo.advantages": ADVANTAGES,
    "algo.objective": OBJECTIVES,
    "algo.loss": LOSSES,
    "model.remat": (AUTO, *REMAT_POLICIES),
    "model.attention": ("auto", *IMPLEMENTATIONS),
    "mesh.device_kind": ("", *DEVICES),
    "optimizer.schedule": SCHEDULES,
}
"""Known names by key. They are looked up for every configuration, because users' files can register components."""

PATHS = (
    "workdir",
    "compilation_cache_dir",
    "model.path",
    "base.cache_dir",
    "rollouts.weights_dir",
    "task.options.",
    "judge.options.",
)
"""Keys, and prefixes of keys, whose values may be paths."""

MAX_SETS = 10**6  # maximum number of sets per prompt
MAX_UPDATES = 10**9  # maximum number of optimizer updates of a run, because they are counted in 32 bits


def read_config(config: ConfigDict, training: bool = True) -> Config:
    """Validates a configuration and returns it in typed form.

    Args:
      config: The configuration of a user, as returned by `get_config` and changed by overrides.
      training: Whether the configuration must be valid for training. Evaluations skip the checks that only concern
        training.

    Raises:
      ConfigError: If a key or value is invalid. The message names the first invalid key, its value and valid values.
    """
    values = config.to_dict()
    refuse_passwords(values)  # first, because other error messages contain values
    sections = read_section(Config, _expand_home(values))
    for key, _, value in sections.flat():
        if key in KNOWN_NAMES:
            validate(value, key, one_of(*KNOWN_NAMES[key]))
    entries = registry_entries(sections)
    for key, _, options in sections.flat():
        if key in entries:
            check_options(key, entries[key], options)
    _check_base(sections.base)
    if JUDGES[sections.judge.name].needs_url and not sections.judge.url:
        raise ConfigError("judge.url='' must be the address of the judge server.")
    if training:
        _check_training(sections)
    return sections


def make_task(section: TaskSection) -> Task:
    """Builds the task that is selected by `task.name`, with `task.options`.

    Raises:
      ConfigError: If the task has neither rewards nor episodes.
    """
    task = TASKS[section.name](**section.options)
    if not isinstance(task, Rewarded | Interactive):
        raise ConfigError(
            f"task.name={section.name!r} selects {type(task).__name__}, which has neither the method reward nor the "
            "method start; define one of them."
        )
    return task


def make_judge(section: JudgeSection, task: Task) -> Judge:
    """Builds the judge that is selected by `judge.name`, with `judge.options`.

    Args:
      section: The `judge` section of the configuration.
      task: The task whose responses the judge clusters.

    Raises:
      ConfigError: If the task does not implement the protocol that the judge requires.
    """
    entry = JUDGES[section.name]
    if not isinstance(task, entry.task):
        compatible = ", ".join(name for name, other in JUDGES.items() if isinstance(task, other.task))
        required = (get_args(entry.task) or (entry.task,))[0]
        missing = ", ".join(sorted(set(dir(required)) - set(dir(Task))))
        raise ConfigError(
            f"judge.name={section.name!r} requires {missing} of {type(task).__name__}; choose {compatible}."
        )
    return entry.open(task, section, **section.options)


def registry_entries(config: Config) -> dict[str, Entry]:
    """Returns the registry entries that a configuration selects, by the dotted key of their options."""
    task, judge, rollouts, algo = config.task, config.judge, config.rollouts, config.algo
    return {
        "task.options": Entry(task.name, TASKS[task.name]),
        "judge.options": Entry(judge.name, JUDGES[judge.name].open, num_given=2),
        "rollouts.options": Entry(rollouts.name, SAMPLERS[rollouts.name].open, num_given=4),
        "algo.options": Entry(algo.advantages, ADVANTAGES[algo.advantages], num_given=1),
        "algo.loss_options": Entry(algo.loss, LOSSES[algo.loss], num_given=1, given=CLIP_RANGE),
    }


def refuse_passwords(value: Any, key: str = "") -> None:
    """Checks that values do not contain addresses with a user or password, because values are printed and stored.

    Args:
      value: A value, or a nested mapping or list of values.
      key: Dotted key of the value, for the error message, which does not contain the value.

    Raises:
      ConfigError: If an address contains a user or password.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            refuse_passwords(inner, f"{key}.{name}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            refuse_passwords(inner, key)
    elif isinstance(value, str) and re.search("@" if key in ("judge.url", "rollouts.urls") else r"://\S*@", value):
        raise ConfigError(
            f"{key} contains a user or password before an @, which would be printed and stored; remove it from the "
            "address. Set judge.api_key_env for the API key of a judge."
        )


def _expand_home(value: Any, key: str = "") -> Any:
    """Replaces the ~ at the beginning of paths, which shells do not expand in --config.KEY=~/FOLDER."""
    if isinstance(value, Mapping):
        return {name: _expand_home(inner, f"{key}.{name}".removeprefix(".")) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_expand_home(inner, key) for inner in value)
    is_path = isinstance(value, str) and value.startswith("~/") and key.startswith(PATHS)
    return os.path.expanduser(value) if is_path else value


def check_judge_limit(judge: JudgeSection, key: str, num_generations: int) -> None:
    """Checks that the judge supports the number of generations per prompt.

    Args:
      judge: The `judge` section of the configuration.
      key: Dotted key of the number of generations, for the error message.
      num_generations: Number of generations per prompt.

    Raises:
      ConfigError: If there are more generations than the judge can cluster.
    """
    max_generations = JUDGES[judge.name].max_generations
    if max_generations is not None and num_generations > max_generations:
        raise ConfigError(
            f"{key}={num_generations} must be at most {max_generations}, the limit of judge.name={judge.name!r}."
        )


def _check_base(base: BaseSection) -> None:
    if base.num_heads % base.num_kv_heads:
        raise ConfigError(f"base.num_kv_heads={base.num_kv_heads} must divide base.num_heads={base.num_heads}.")
    if base.head_dim % 2:
        raise ConfigError(
            f"base.head_dim={base.head_dim} must be even, because rotary embeddings rotate pairs of values."
        )


def _check_training(config: Config) -> None:
    train, algo = config.train, config.algo
    if config.sampling.temperature == 0:
        raise ConfigError("sampling.temperature=0.0 must be positive, because training requires random sampling.")
    top_p, top_k = config.sampling.top_p, config.sampling.top_k
    if top_p < 1 or top_k:
        raise ConfigError(
            f"sampling.top_p={top_p} and sampling.top_k={top_k} would bias the gradient, because the trained "
            "log-probabilities are normalized over all tokens; set top_p=1 and top_k=0 for training."
        )
    if algo.set_size >= train.num_generations:
        raise ConfigError(
            f"algo.set_size={algo.set_size} must be smaller than train.num_generations={train.num_generations}, also "
            "for methods without sets, because all runs log metrics of sets; lower algo.set_size."
        )
    all_sets = math.comb(train.num_generations, algo.set_size)
    if algo.num_sets > all_sets:
        raise ConfigError(f"algo.num_sets={algo.num_sets} must be at most C(N, n) = {all_sets}, or 0 for all sets.")
    if not (algo.num_sets or OBJECTIVES[algo.objective].closed_form) and all_sets > MAX_SETS:
        raise ConfigError(f"algo.num_sets=0 selects all {all_sets} sets; set it to a smaller number, such as 1000.")
    if train.prompts_per_batch % train.prompts_per_minibatch:
        raise ConfigError(
            f"train.prompts_per_minibatch={train.prompts_per_minibatch} must divide "
            f"train.prompts_per_batch={train.prompts_per_batch}."
        )
    if train.max_draws and (not train.refill or train.max_draws < train.prompts_per_batch):
        raise ConfigError(
            f"train.max_draws={train.max_draws} requires train.refill=True and at least "
            f"train.prompts_per_batch={train.prompts_per_batch} prompts; set train.max_draws=0 for the default limit."
        )
    updates = updates_per_step(train)
    if train.num_steps * updates > MAX_UPDATES:
        raise ConfigError(
            f"train.num_steps={train.num_steps} with {updates} updates per step exceeds the maximum of {MAX_UPDATES:,} "
            "updates; lower it."
        )
    if config.optimizer.warmup_updates >= train.num_steps * updates:
        raise ConfigError(
            f"optimizer.warmup_updates={config.optimizer.warmup_updates} must be smaller than the number of updates of "
            f"the run, {train.num_steps * updates:,} (train.num_steps={train.num_steps}); lower it, or raise "
            "train.num_steps."
        )
    if config.lora.rank and train.trainable_pattern:
        raise ConfigError(
            f"lora.rank={config.lora.rank} trains only adapters, which excludes "
            f"train.trainable_pattern={train.trainable_pattern!r}; set only one of them."
        )
    if config.model.param_dtype != "float32" and not config.lora.rank:
        raise ConfigError(
            f"model.param_dtype={config.model.param_dtype!r} must be float32 for weights that are trained, because "
            "bfloat16 rounds away almost all small updates; set model.dtype=bfloat16 for activations and matrix "
            "products only, or train an adapter (lora.rank)."
        )
    check_judge_limit(config.judge, "train.num_generations", train.num_generations)
    if config.eval.every:
        check_judge_limit(config.judge, "eval.num_generations", config.eval.num_generations)
    max_tokens = max_sequence_tokens(config)
    if train.row_tokens and train.row_tokens < max_tokens:
        raise ConfigError(
            f"train.row_tokens={train.row_tokens} must be at least train.max_prompt_tokens + sampling.max_tokens = "
            f"{max_tokens} tokens."
        )
    if algo.truncated == "penalize" and algo.overlong_tokens > config.sampling.max_tokens:
        raise ConfigError(
            f"algo.overlong_tokens={algo.overlong_tokens} must be at most "
            f"sampling.max_tokens={config.sampling.max_tokens}; lower it, or set it to 0."
        )
    estimator = make_estimator(algo)
    if train.num_generations < estimator.min_generations:
        raise ConfigError(
            f"train.num_generations={train.num_generations} must be at least {estimator.min_generations} for "
            f"{estimator.title} with algo.options={dict(algo.options)}."
        )
    if "clusters" in estimator.reads and not JUDGES[config.judge.name].clusters:
        raise ConfigError(
            f"{estimator.title} requires clusters, which judge.name={config.judge.name!r} does not provide; choose "
            "another judge, or a method without clusters, such as GRPO (append :grpo to the configuration file)."
        )
    _check_rollouts(config)


def _while_training() -> str:
    """Returns the names of the samplers that can generate while the policy is trained."""
    return " or ".join(name for name, sampler in SAMPLERS.items() if sampler.while_training)


def _check_rollouts(config: Config) -> None:
    rollouts, sampler = config.rollouts, SAMPLERS[config.rollouts.name]
    if sampler.needs_urls and not rollouts.urls:
        raise ConfigError("rollouts.urls='' must be the address of at least one server of the policy.")
    if rollouts.in_flight and not sampler.while_training:
        raise ConfigError(
            f"rollouts.in_flight=True is not supported with rollouts.name={rollouts.name!r}, whose generations end "
            f"before an update; set rollouts.in_flight=False, or rollouts.name={_while_training()}."
        )
    if rollouts.in_flight and rollouts.shared_servers:
        raise ConfigError(
            "rollouts.shared_servers=True is not supported with rollouts.in_flight=True, because other processes would "
            "accept completions before the first process has verified the update; set one of them to False."
        )
    staleness = config.train.staleness
    if not staleness:
        return
    # With staleness 1, the sampler generates the next batch with the current weights while an update replaces them. The
    # weights that generated a batch are then one step older than the weights that are trained on it.
    if rollouts.shared_servers:
        raise ConfigError(
            f"rollouts.shared_servers=True is not supported with train.staleness={staleness}, because one process "
            "would update the servers while others still generate; set rollouts.shared_servers=False or "
            "train.staleness=0."
        )
    if not sampler.while_training:
        raise ConfigError(
            f"rollouts.name={rollouts.name!r} shares the weights and devices of the trainer, so it cannot generate "
            f"during an update; set train.staleness=0, or rollouts.name={_while_training()}."
        )
    if not config.algo.importance_cap:
        raise ConfigError(
            "algo.importance_cap=0.0 would not correct for the older policy that generates with "
            f"train.staleness={staleness}; set it, for example to 2."
        )
    if staleness > 1 and not rollouts.in_flight:
        raise ConfigError(
            f"train.staleness={staleness} requires rollouts.in_flight=True, because weight updates otherwise wait for "
            "all responses in progress; set it, or set train.staleness=1."
        )
