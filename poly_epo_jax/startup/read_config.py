"""Validates a user's configuration and builds the typed configuration, task and judge. Shared by all commands.

Sections validate their own keys (config/keys.py). This module checks the names of components against their registries,
and options against the signatures of registry entries. rules.py contains the rules for combinations of keys.
"""

import os
import re
from collections.abc import Collection, Mapping
from typing import Any, get_args

from ml_collections import ConfigDict

from poly_epo_jax.config.checks import VARIABLE, one_of, validate
from poly_epo_jax.config.keys import Config, ConfigError, JudgeKeys, TaskSection
from poly_epo_jax.config.options import Entry, check_options
from poly_epo_jax.config.section import read_section
from poly_epo_jax.judges import JUDGES, NOT_CLUSTERING
from poly_epo_jax.model.attention import IMPLEMENTATIONS
from poly_epo_jax.model.transformer import AUTO, REMAT_POLICIES
from poly_epo_jax.parallel.devices import DEVICES
from poly_epo_jax.rollouts import SAMPLERS, WEIGHT_SYNCS
from poly_epo_jax.rollouts.joined_judge import JoinedJudge
from poly_epo_jax.rollouts.rewards import reward_parts
from poly_epo_jax.set_rl import LOSSES, OBJECTIVES
from poly_epo_jax.startup.rules import check_rules, command_rules, training_rules
from poly_epo_jax.step.advantages import ADVANTAGES, CLIP_RANGE
from poly_epo_jax.step.optimizer import SCHEDULES
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.tasks.problems import check_problems, source_weights
from poly_epo_jax.types import HasRewards, Interactive, Judge, Rewarded, Task

KNOWN_NAMES: dict[str, Collection[str]] = {
    "task.name": TASKS,
    "judge.name": JUDGES,
    "audit.judge.name": JUDGES,
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

# Patterns of passwords and queries in addresses by key. In values of other keys, such as templates, a ? is accepted.
_SECRETS = {
    **dict.fromkeys(("judge.url", "audit.judge.url", "audit.paraphrase.url", "rollouts.urls"), "[@?#]"),
    **dict.fromkeys(("--models", "--judge"), r"://\S*@|://[^\s,]*[?#]"),  # addresses with labels
}

PATHS = (
    "workdir",
    "compilation_cache_dir",
    "model.path",
    "base.cache_dir",
    "rollouts.weights_dir",
    "task.options.",
    "judge.options.",
    "audit.judge.options.",
)
"""Keys, and prefixes of keys, whose values may be paths."""


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
    check_rules(command_rules(sections))
    if training:
        check_rules(training_rules(sections))
        joined = [sections.judge, sections.audit.judge] if sections.judge.verify else [sections.judge]
        for judge in [*joined, sections.audit.judge] if sections.audit.every else joined:
            check_judge_limit(judge, "train.num_generations", sections.train.num_generations)
        for judge in joined if sections.eval.every else ():
            check_judge_limit(judge, "eval.num_generations", sections.eval.num_generations)
    return sections


def make_task(section: TaskSection) -> Task:
    """Builds the task that is selected by `task.name`, with `task.options`.

    Raises:
      ConfigError: If the task has neither rewards nor episodes, or invalid rewards or problems.
      ValueError: If two training problems or two held-out problems have the same id, or if weights of datasets are
        invalid.
    """
    task = TASKS[section.name](**section.options)
    check_problems(task)
    if not isinstance(task, Rewarded | HasRewards | Interactive):
        raise ConfigError(
            f"task.name={section.name!r} selects {type(task).__name__}, which has neither the method reward, nor "
            "rewards, nor the method start; define one of them."
        )
    if isinstance(task, HasRewards):
        reward_parts(task)
    source_weights(task)
    return task


def make_judge(section: JudgeKeys, task: Task) -> Judge:
    """Builds the judge that is selected by `judge.name`, with `judge.options`.

    Args:
      section: The section `judge` or `audit.judge` of the configuration.
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
            f"{section.dotted('name')}={section.name!r} requires {missing} of {type(task).__name__}; choose "
            f"{compatible}."
        )
    judge = entry.open(task, section, **section.options)
    if not entry.clusters:
        NOT_CLUSTERING.add(type(judge))
    return judge


def training_judge(config: Config, task: Task) -> Judge:
    """Builds the judge of training: that of `judge`, joined with that of `audit.judge` if `judge.verify` is set.

    Raises:
      ConfigError: If the task does not implement the protocol that a judge requires.
    """
    judge = make_judge(config.judge, task)
    return JoinedJudge(judge, make_judge(config.audit.judge, task)) if config.judge.verify else judge


def registry_entries(config: Config) -> dict[str, Entry]:
    """Returns the registry entries that a configuration selects, by the dotted key of their options."""
    task, judge, rollouts, algo = config.task, config.judge, config.rollouts, config.algo
    auditor = config.audit.judge
    return {
        "task.options": Entry(task.name, TASKS[task.name]),
        "judge.options": Entry(judge.name, JUDGES[judge.name].open, num_given=2),
        "audit.judge.options": Entry(auditor.name, JUDGES[auditor.name].open, num_given=2),
        "rollouts.options": Entry(rollouts.name, SAMPLERS[rollouts.name].open, num_given=4),
        "algo.options": Entry(algo.advantages, ADVANTAGES[algo.advantages], num_given=1),
        "algo.loss_options": Entry(algo.loss, LOSSES[algo.loss], num_given=1, given=CLIP_RANGE),
    }


def refuse_passwords(value: Any, key: str = "") -> None:
    """Checks that values do not contain passwords or keys, because values are printed and stored.

    Args:
      value: A value, or a nested mapping or list of values.
      key: Dotted key of the value, for the error message, which does not contain the value.

    Raises:
      ConfigError: If an address contains a user, a password or a query, or if `judge.api_key_env` is not the name of a
        variable: one that exists, or a text such as JUDGE_KEY.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            refuse_passwords(inner, f"{key}.{name}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            refuse_passwords(inner, key)
    elif isinstance(value, str):
        if re.search(_SECRETS.get(key, r"://\S*@"), value):
            raise ConfigError(
                f"{key} contains a user or password before an @, or a query after a ?, which would be printed and "
                "stored; remove it from the address. Set judge.api_key_env for the API key of a judge."
            )
        variable = re.search(r"api_key_env=([^,]+)", f"{key}={value}")
        if variable and not VARIABLE.fullmatch(variable[1]) and variable[1] not in os.environ:
            raise ConfigError(
                f"{key if key.endswith('.api_key_env') else 'judge.api_key_env'} must be the name of an environment "
                "variable, such as GEMINI_API_KEY; store the API key in the variable, because this value is printed "
                "and stored."
            )


def _expand_home(value: Any, key: str = "") -> Any:
    """Replaces the ~ at the beginning of paths, which shells do not expand in --config.KEY=~/FOLDER."""
    if isinstance(value, Mapping):
        return {name: _expand_home(inner, f"{key}.{name}".removeprefix(".")) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_expand_home(inner, key) for inner in value)
    is_path = isinstance(value, str) and value.startswith("~/") and key.startswith(PATHS)
    return os.path.expanduser(value) if is_path else value


def check_judge_limit(judge: JudgeKeys, key: str, num_generations: int) -> None:
    """Checks that the judge supports the number of generations per prompt.

    Args:
      judge: The section `judge` or `audit.judge` of the configuration.
      key: Dotted key of the number of generations, for the error message.
      num_generations: Number of generations per prompt.

    Raises:
      ConfigError: If there are more generations than the judge can cluster.
    """
    max_generations = JUDGES[judge.name].max_generations
    if max_generations is not None and num_generations > max_generations:
        raise ConfigError(
            f"{key}={num_generations} must be at most {max_generations}, the limit of "
            f"{judge.dotted('name')}={judge.name!r}."
        )
