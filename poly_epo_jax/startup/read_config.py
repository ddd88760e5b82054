"""Turns what a user has written into a configuration that can run: the one check shared by all commands.

Sections check their own keys (config/keys.py). Here the names of parts are looked up in their registries, options are
compared with what the named part takes, and combinations of sections are checked.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import ConfigDict

from poly_epo_jax.config.checks import one_of, require
from poly_epo_jax.config.keys import (
    BaseSection,
    Config,
    ConfigError,
    JudgeSection,
    TaskSection,
    longest_sequence,
    updates_per_step,
)
from poly_epo_jax.config.options import Entry, check_options
from poly_epo_jax.config.section import read_section
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.model.attention import IMPLEMENTATIONS
from poly_epo_jax.model.qwen3 import AUTO, REMAT_POLICIES
from poly_epo_jax.parallel.devices import DEVICES
from poly_epo_jax.rollouts import SAMPLERS, WEIGHT_SYNCS
from poly_epo_jax.set_rl import LOSSES, OBJECTIVES
from poly_epo_jax.step.advantages import ADVANTAGES, CLIP_RANGE, make_estimator
from poly_epo_jax.step.optimizer import SCHEDULES
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.types import Judge, Task

CHOICES: dict[str, Collection[str]] = {
    "task.name": TASKS,
    "judge.name": JUDGES,
    "rollouts.name": SAMPLERS,
    "rollouts.weight_sync": WEIGHT_SYNCS,
    "algo.advantages": ADVANTAGES,
    "algo.objective": OBJECTIVES,
    "algo.loss": LOSSES,
    "model.remat": (AUTO, *REMAT_POLICIES),
    "model.attention": ("auto", *IMPLEMENTATIONS),
    "mesh.device": ("", *DEVICES),
    "optimizer.schedule": SCHEDULES,
}
"""The names that a key may have. A user's own file can add to them, so they are read when a configuration is."""

MAX_SETS = 10**6  # per prompt
MAX_UPDATES = 10**9  # they are counted in 32 bits


def read_config(config: ConfigDict, training: bool = True) -> Config:
    """The typed configuration.

    Args:
      training: whether it is for training; an evaluation needs less.

    Raises:
      ConfigError: at the first key that is wrong; the message names it, its value and what it may be.
    """
    values = config.to_dict()
    refuse_passwords(values)  # before a check shows them
    sections = read_section(Config, values)
    for key, _, value in sections.flat():
        if key in CHOICES:
            require(value, key, one_of(*CHOICES[key]))
    entries = registry_entries(sections)
    for key, _, options in sections.flat():
        if key in entries:
            check_options(key, entries[key], options)
    _check_base(sections.base)
    if JUDGES[sections.judge.name].needs_url and not sections.judge.url:
        raise ConfigError("judge.url='' must name the judge's server.")
    if training:
        _check_training(sections)
    return sections


def make_task(section: TaskSection) -> Task:
    """The task that the section names, with its options."""
    return TASKS[section.name](**section.options)


def make_judge(section: JudgeSection, task: Task) -> Judge:
    """The judge that the section names, with its options.

    Raises:
      ConfigError: the task lacks what the judge clusters by.
    """
    entry = JUDGES[section.name]
    if not isinstance(task, entry.task):
        able = ", ".join(name for name, other in JUDGES.items() if isinstance(task, other.task))
        missing = ", ".join(sorted(set(dir(entry.task)) - set(dir(Task))))
        raise ConfigError(f"judge.name={section.name!r} needs {missing} of {type(task).__name__}; choose {able}.")
    return entry.open(task, section, **section.options)


def registry_entries(config: Config) -> dict[str, Entry]:
    """Returns the registry entries that a configuration selects, by the keys of their options."""
    task, judge, rollouts, algo = config.task, config.judge, config.rollouts, config.algo
    return {
        "task.options": Entry(task.name, TASKS[task.name]),
        "judge.options": Entry(judge.name, JUDGES[judge.name].open, num_given=2),
        "rollouts.options": Entry(rollouts.name, SAMPLERS[rollouts.name].open, num_given=4),
        "algo.options": Entry(algo.advantages, ADVANTAGES[algo.advantages], num_given=1),
        "algo.loss_options": Entry(algo.loss, LOSSES[algo.loss], num_given=1, given=CLIP_RANGE),
    }


def refuse_passwords(value: Any, key: str = "") -> None:
    """Refuses addresses that contain a password, without showing it; accepted values are printed and stored.

    Raises:
      ConfigError: naming the key.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            refuse_passwords(inner, f"{key}.{name}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            refuse_passwords(inner, key)
    elif isinstance(value, str) and re.search("@" if key in ("judge.url", "rollouts.urls") else r"://\S*@", value):
        raise ConfigError(
            f"{key} holds a user or password before an @, which would be printed and stored; write the address without "
            "it. The key of a judge is named by judge.api_key_env."
        )


def check_judge(judge: JudgeSection, key: str, num_generations: int) -> None:
    """Refuses a value of `key` that asks for more generations of a prompt than the judge can cluster.

    Raises:
      ConfigError: naming the key, and how many there may be.
    """
    most = JUDGES[judge.name].most
    if most is not None and num_generations > most:
        raise ConfigError(
            f"{key}={num_generations} must be at most {most}, which judge.name={judge.name!r} can cluster."
        )


def _check_base(base: BaseSection) -> None:
    if base.num_heads % base.num_kv_heads:
        raise ConfigError(f"base.num_kv_heads={base.num_kv_heads} must divide base.num_heads={base.num_heads}.")
    if base.head_dim % 2:
        raise ConfigError(f"base.head_dim={base.head_dim} must be even, for rotary positions turn pairs.")


def _check_training(config: Config) -> None:
    train, algo = config.train, config.algo
    if config.sampling.temperature == 0:
        raise ConfigError("sampling.temperature=0.0 must be positive, for training needs samples.")
    top_p, top_k = config.sampling.top_p, config.sampling.top_k
    if top_p < 1 or top_k:
        raise ConfigError(
            f"sampling.top_p={top_p} and sampling.top_k={top_k} would bias the gradient, for the log-probabilities "
            "that are trained are of all tokens, not of those that are sampled from; train with 1 and 0."
        )
    if algo.set_size >= train.num_generations:
        raise ConfigError(
            f"algo.set_size={algo.set_size} must be smaller than train.num_generations={train.num_generations}."
        )
    all_sets = math.comb(train.num_generations, algo.set_size)
    if algo.num_sets > all_sets:
        raise ConfigError(f"algo.num_sets={algo.num_sets} must be at most C(N, n) = {all_sets}, or 0 for all.")
    if not (algo.num_sets or OBJECTIVES[algo.objective].closed_form) and all_sets > MAX_SETS:
        raise ConfigError(f"algo.num_sets=0 means all {all_sets} sets; draw some, e.g. 1000.")
    if train.prompts_per_batch % train.prompts_per_minibatch:
        raise ConfigError(
            f"train.prompts_per_minibatch={train.prompts_per_minibatch} must divide "
            f"train.prompts_per_batch={train.prompts_per_batch}."
        )
    updates = updates_per_step(train)
    if train.num_steps * updates > MAX_UPDATES:
        raise ConfigError(
            f"train.num_steps={train.num_steps} with {updates} updates each must make at most {MAX_UPDATES:,} updates."
        )
    if config.lora.rank and train.trainable:
        raise ConfigError(
            f"lora.rank={config.lora.rank} trains adapters and none of the weights that "
            f"train.trainable={train.trainable!r} names; leave one of the two out."
        )
    check_judge(config.judge, "train.num_generations", train.num_generations)
    if config.eval.every:
        check_judge(config.judge, "eval.num_generations", config.eval.num_generations)
    longest = longest_sequence(config)
    if train.row_tokens and train.row_tokens < longest:
        raise ConfigError(
            f"train.row_tokens={train.row_tokens} must hold train.max_prompt_tokens + sampling.max_tokens = {longest} "
            "tokens."
        )
    estimator = make_estimator(algo)
    if train.num_generations < estimator.least_generations:
        raise ConfigError(
            f"train.num_generations={train.num_generations} must be at least {estimator.least_generations} for "
            f"{estimator.title} with algo.options={dict(algo.options)}."
        )
    if "clusters" in estimator.reads and not JUDGES[config.judge.name].clusters:
        raise ConfigError(
            f"judge.name={config.judge.name!r} makes no clusters, but {estimator.title} reads them; choose another "
            "judge, or a method that does not, such as :grpo after the configuration file."
        )
    _check_rollouts(config)


def _check_rollouts(config: Config) -> None:
    rollouts, sampler = config.rollouts, SAMPLERS[config.rollouts.name]
    if sampler.needs_urls and not rollouts.urls:
        raise ConfigError("rollouts.urls='' must name a server of the policy.")
    if not config.train.staleness:
        return
    if rollouts.shared:
        raise ConfigError(
            "rollouts.shared=True would let one host change the servers' weights while others still generate with "
            "train.staleness=1; set one of the two back."
        )
    if not sampler.while_training:
        others = " or ".join(name for name, other in SAMPLERS.items() if other.while_training)
        raise ConfigError(
            f"rollouts.name={rollouts.name!r} shares the trainer's weights and devices and cannot generate while they "
            f"train; set train.staleness=0, or rollouts.name={others}."
        )
    if not config.algo.importance_cap:
        raise ConfigError(
            "algo.importance_cap=0.0 would ignore that train.staleness=1 trains on the generations of an older policy; "
            "set it, for example to 2."
        )
