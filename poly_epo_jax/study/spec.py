"""The content of a study file, whose `get_study()` returns a `Study`. Needs no JAX."""

import dataclasses
import re
import runpy
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poly_epo_jax.config.default import METHODS
from poly_epo_jax.config.keys import ConfigError

Changes = Mapping[str, Any]
"""Values of configuration keys by their dotted names: {"algo.set_size": 2}."""

PAPER_METHODS: dict[str, dict[str, Any]] = {
    name: {f"algo.{key}": value for key, value in section.items()} for name, section in METHODS.items()
}
"""The paper's three methods, for `Study.methods`: poly_epo, grpo, grpo_div."""

RATE, SEED, WORKDIR = "optimizer.learning_rate", "seed", "workdir"
STUDY_KEYS = {RATE: "`rates`", SEED: "`seeds`", WORKDIR: "`folder`"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+]*(-[A-Za-z0-9_.+]+)*")


@dataclasses.dataclass(frozen=True)
class Task:
    """What to train on: a configuration file, `configs/polynomial.py` or `FILE:words`, and keys changed in it."""

    config: str
    changes: Changes = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How `python -m poly_epo_jax.evaluate` evaluates every finished run.

    Args:
      benchmarks: as in --benchmarks; empty: the task's own held-out problems.
      num_generations: number of generations per problem.
      judge: whether to cluster the generations.
    """

    benchmarks: Sequence[str] = ()
    num_generations: int = 64
    judge: bool = True


@dataclasses.dataclass(frozen=True)
class Study:
    """Every combination of method, rate, seed and task: one run each.

    Args:
      tasks: the tasks by name.
      methods: the methods by name, each as the keys that define it. If several set one key, a method's value takes
        precedence over a task's, and a task's over one of `settings`.
      rates: optimizer.learning_rate of the runs.
      seeds: seed of the runs. Runs with the same seed see the same prompts in the same order, so methods are compared
        seed by seed.
      settings: keys changed in every run.
      baseline: the method that the others are compared with; empty: the last.
      evaluation: how to evaluate each finished run; None: only training itself evaluates.
      keep_weights: False empties a run's checkpoints once it is finished and evaluated.
      folder: where everything is kept; empty: runs/study-NAME, after the study file.

    Raises:
      ConfigError: a name cannot name a folder, something is empty or there twice, or a key is one that the study sets.
    """

    tasks: Mapping[str, Task]
    methods: Mapping[str, Changes] = dataclasses.field(default_factory=lambda: PAPER_METHODS)
    rates: Sequence[float] = (5e-4,)
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
            "rates": self.rates,
            "seeds": self.seeds,
        }.items():
            if not values:
                raise ConfigError(f"{field} is empty; a study needs at least one of them.")
        for field, numbers in {"rates": [f"{rate:g}" for rate in self.rates], "seeds": list(self.seeds)}.items():
            if len(set(numbers)) < len(numbers):
                raise ConfigError(f"{field}={tuple(numbers)} holds one of them twice.")
        for field, named in {"tasks": self.tasks, "methods": self.methods}.items():
            for name in named:
                if not _NAME.fullmatch(name):
                    raise ConfigError(
                        f"{field} holds the name {name!r}, which is to name folders: use letters, digits, _ . + and -."
                    )
        if self.baseline not in ("", *self.methods):
            raise ConfigError(f"baseline={self.baseline!r} is no method; choose from {', '.join(self.methods)}.")
        changed = {"settings": self.settings} | {f"methods[{name!r}]": keys for name, keys in self.methods.items()}
        for where, keys in (changed | {f"tasks[{name!r}]": task.changes for name, task in self.tasks.items()}).items():
            for key in STUDY_KEYS.keys() & keys.keys():
                raise ConfigError(f"{where} sets {key}, which {STUDY_KEYS[key]} of the study says.")

    @property
    def resolved_baseline(self) -> str:
        """The method that the others are compared with."""
        return self.baseline or list(self.methods)[-1]


def read_study(file: Path) -> Study:
    """The study that `get_study()` of a study file returns, with its folder filled in.

    Raises:
      ConfigError: there is no such file or function, or the function fails or returns no study.
    """
    if not file.is_file():
        found = ", ".join(sorted(path.name for path in file.parent.glob("*.py"))) or "none"
        raise ConfigError(f"There is no study file {file}; Python files in {file.parent}: {found}.")
    try:
        get_study = runpy.run_path(str(file)).get("get_study")
        study = get_study() if get_study else None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except Exception as error:
        traceback.print_exc()  # the author's own code
        raise ConfigError(f"{file} fails: {type(error).__name__}: {error}") from error
    if not isinstance(study, Study):
        raise ConfigError(f"{file} has no get_study() that returns a Study; docs/study.md tells how it is written.")
    return dataclasses.replace(study, folder=study.folder or f"runs/study-{file.stem}")
