"""Defines and reads study files, whose `get_study()` returns a `Study`. Does not require JAX."""

import dataclasses
import re
import runpy
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.config.methods import METHODS
from poly_epo_jax.system.output_folder import user_path

Changes = Mapping[str, Any]
"""Values of configuration keys by dotted name, such as {"algo.set_size": 2}."""

PAPER_METHODS: dict[str, dict[str, Any]] = {
    name: {f"algo.{key}": value for key, value in section.items()} for name, section in METHODS.items()
}
"""The three methods of the paper, for `Study.methods`: poly_epo, grpo and grpo_div."""

RATE, SEED, WORKDIR = "optimizer.learning_rate", "seed", "workdir"
STUDY_KEYS = {RATE: "`learning_rates`", SEED: "`seeds`", WORKDIR: "`folder`"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+]*(-[A-Za-z0-9_.+]+)*")


@dataclasses.dataclass(frozen=True)
class StudyTask:
    """A training task of a study.

    Attributes:
      config: Configuration file or recipe, such as `configs/polynomial.py`, `polynomial` or `FILE:METHOD,MACHINE`.
      changes: Values of the keys that the task changes.
    """

    config: str
    changes: Changes = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Settings of the evaluation of each finished run with `python -m poly_epo_jax.evaluate`.

    Attributes:
      benchmarks: Benchmarks, as in --benchmarks. If empty, runs are evaluated on the held-out problems of their
        synthetic task. Must not be empty for the task `math`, which is not a benchmark.
      num_generations: Number of generations per problem.
      judge: Whether the judge clusters the generations.
    """

    benchmarks: Sequence[str] = ()
    num_generations: int = 64
    judge: bool = True


@dataclasses.dataclass(frozen=True)
class Study:
    """A study, which has one run for each combination of method, learning rate, seed and task.

    Attributes:
      tasks: Tasks by name.
      methods: Methods by name. Each method is defined by values of configuration keys. If a key is set several times,
        the value of the method takes precedence over the value of the task, and the task over `settings`.
      learning_rates: Values of `optimizer.learning_rate`.
      seeds: Values of `seed`. Runs with equal seeds train on the same prompts in the same order, so that methods can be
        compared in pairs of runs.
      settings: Values of configuration keys for all runs.
      baseline: Method that the other methods are compared with. If empty, the last method.
      evaluation: Evaluation of each finished run. If None, runs are only evaluated during training.
      keep_weights: Whether checkpoints are kept. If False, the checkpoint folders of a run are emptied after it is
        finished and evaluated.
      folder: Folder of the study. If empty, runs/study-NAME, where NAME is the name of the study file.

    Raises:
      ConfigError: If a name is not a valid folder name, a field is empty or contains duplicates, `baseline` is not a
        method, or a changed key is controlled by the study.
    """

    tasks: Mapping[str, StudyTask]
    methods: Mapping[str, Changes] = dataclasses.field(default_factory=lambda: PAPER_METHODS)
    learning_rates: Sequence[float] = (5e-4,)
    seeds: Sequence[int] = (0, 1, 2)
    settings: Changes = dataclasses.field(default_factory=dict)
    baseline: str = ""
    evaluation: Evaluation | None = None
    keep_weights: bool = True
    folder: str = ""

    def __post_init__(self):
        for field, values in {
            "tasks": self.tasks,
            "methods": self.methods,
            "learning_rates": self.learning_rates,
            "seeds": self.seeds,
        }.items():
            if not values:
                raise ConfigError(f"{field} is empty; specify at least one value.")
        for field, numbers in {
            "learning_rates": [f"{rate:g}" for rate in self.learning_rates],
            "seeds": list(self.seeds),
        }.items():
            if len(set(numbers)) < len(numbers):
                raise ConfigError(f"{field}={tuple(numbers)} contains duplicates; remove them.")
        for field, named in {"tasks": self.tasks, "methods": self.methods}.items():
            for name in named:
                if not _NAME.fullmatch(name):
                    raise ConfigError(
                        f"{field} contains {name!r}, which is not a valid folder name; use letters, digits and _ . + -."
                    )
        if self.baseline not in ("", *self.methods):
            raise ConfigError(
                f"baseline={self.baseline!r} is not a method of the study; choose from {', '.join(self.methods)}."
            )
        changed = {"settings": self.settings} | {f"methods[{name!r}]": keys for name, keys in self.methods.items()}
        for where, keys in (changed | {f"tasks[{name!r}]": task.changes for name, task in self.tasks.items()}).items():
            for key in STUDY_KEYS.keys() & keys.keys():
                raise ConfigError(
                    f"{where} sets {key}, which is controlled by {STUDY_KEYS[key]} of the study; remove it."
                )

    @property
    def resolved_baseline(self) -> str:
        """Method that the other methods are compared with."""
        return self.baseline or list(self.methods)[-1]


def read_study(file: Path) -> Study:
    """Executes a study file and returns the study of its `get_study()`, with `folder` set.

    Raises:
      ConfigError: If the function does not exist, fails or does not return a study.
    """
    try:
        get_study = runpy.run_path(str(file)).get("get_study")
        study = get_study() if get_study else None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except Exception as error:
        traceback.print_exc()  # traceback of the code in the study file
        raise ConfigError(f"Failed to execute {file}: {type(error).__name__}: {error}") from error
    if not isinstance(study, Study):
        raise ConfigError(
            f"{file} must define a function get_study() that returns a Study; see docs/how_to/compare_methods.md."
        )
    return dataclasses.replace(study, folder=str(user_path(study.folder or f"runs/study-{file.stem}")))
