"""Opens benchmarks: mathematical benchmarks by name, held-out problems of synthetic tasks, and files or datasets."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poly_epo_jax.config.keys import Config, ConfigError, TaskSection
from poly_epo_jax.config.options import Entry, check_options
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.rollouts.prompts import with_system_prompt
from poly_epo_jax.startup.resume_checks import problems_digest
from poly_epo_jax.system.digests import option_digests
from poly_epo_jax.system.text import did_you_mean
from poly_epo_jax.tasks import TASKS, MathTask
from poly_epo_jax.tasks.verifier import GradedInWorkers
from poly_epo_jax.types import Problem, Sampling, Task

BENCHMARKS: dict[str, dict[str, Any]] = {
    "beyond_aime": {"train": "ByteDance-Seed/BeyondAIME:test"},
    "aime_2025": {"train": "MathArena/aime_2025", "id_column": "problem_idx"},
    "aime_2026": {"train": "MathArena/aime_2026", "id_column": "problem_idx"},
    "hmmt_feb_2025": {"train": "MathArena/hmmt_feb_2025", "id_column": "problem_idx"},
    "hmmt_nov_2025": {"train": "MathArena/hmmt_nov_2025", "id_column": "problem_idx"},
    "minerva": {"train": "math-ai/minervamath:test", "problem_column": "question"},
    "math_500": {"train": "HuggingFaceH4/MATH-500:test", "id_column": "unique_id"},
    "gsm8k": {"train": "openai/gsm8k:main:test", "problem_column": "question", "answer_marker": "####"},
}
"""Options of `MathTask` by benchmark: the Hugging Face dataset and the names of its columns."""


@dataclasses.dataclass
class Benchmark:
    """A benchmark.

    Attributes:
      label: Name of the benchmark in tables, and of its folder.
      task: Grades the responses.
      problems: Problems in their order in the benchmark.
    """

    label: str
    task: Task
    problems: Sequence[Problem]

    @property
    def digests(self) -> dict[str, str]:
        """Digest of all problems and, if answers are compared in worker processes, the version of the grader."""
        version = {"grader": self.task.grader_version} if isinstance(self.task, GradedInWorkers) else {}
        return {"problems": problems_digest(self.problems)} | version


def open_benchmark(name: str, section: TaskSection) -> Benchmark:
    """Opens a benchmark.

    Args:
      name: A key of BENCHMARKS, the name of a synthetic task (evaluated on its held-out problems), or a source that
        `tasks.problems.read_source` accepts, such as a .jsonl file with columns `problem` and `answer`. The prefix
        `label=` sets the label.
      section: The `task` section of the configuration. It provides the options of the task that it names, the
        prompt template and the number of grading processes of mathematical problems, and the system prompt.

    Returns:
      The benchmark with all of its problems.

    Raises:
      ValueError, OSError: If the benchmark is unknown or cannot be read.
    """
    check_benchmark(name)
    source, options = split_label(name)[1], task_options(name, section)
    if has_held_out_problems(source):
        check_options("task.options", Entry(source, TASKS[source]), options)
        task = TASKS[source](**options)
        problems = task.held_out_problems
    else:
        task = MathTask(**options)
        problems = task.train_problems
    return Benchmark(benchmark_label(name), task, with_system_prompt(problems, section.system_prompt))


def check_benchmark(name: str) -> None:
    """Checks that a benchmark is known, a path, or a dataset of the Hugging Face Hub (OWNER/NAME).

    Raises:
      ConfigError: If the benchmark is none of these. The message lists the known benchmarks.
    """
    source, known = split_label(name)[1], {*BENCHMARKS, *TASKS} - {"math"}
    if source not in known and not (re.search("[/.:]", source) or Path(source).exists()):
        raise ConfigError(f"{source!r} is not a benchmark, a file or a dataset OWNER/NAME{did_you_mean(source, known)}")


def has_held_out_problems(name: str) -> bool:
    """Returns True if a benchmark is the name of a task that is evaluated on its held-out problems."""
    return name in TASKS and name != "math"


def task_options(name: str, section: TaskSection) -> dict[str, Any]:
    """Returns the options of the task that grades a benchmark.

    Args:
      name: Name of the benchmark, see `open_benchmark`.
      section: The `task` section of the configuration.
    """
    source = split_label(name)[1]
    if has_held_out_problems(source):
        return dict(section.options) if source == section.name else {}
    shared = {key: value for key, value in section.options.items() if key in ("template", "num_workers")}
    return BENCHMARKS.get(source, {"train": source}) | shared


def benchmark_label(name: str) -> str:
    """Returns the label in `label=name` or, without one, the name of the benchmark or file without split and suffix."""
    return split_label(name)[0] or label_of(name).split(":")[0].split(".")[0]


def label_of(name: str) -> str:
    """Returns the label in `label=name` or, without one, the last component of the path."""
    label, source = split_label(name)
    return label or source.rstrip("/").split("/")[-1]


def split_label(name: str) -> tuple[str, str]:
    """Returns the label (empty without one) and the name of a model or benchmark that is given as `label=name`.

    The first = ends the label, unless a slash precedes it. Shells do not expand ~/ in `--models=~/FOLDER`.
    """
    label, equals, source = name.partition("=")
    label, source = (label, source) if equals and "/" not in label else ("", name)
    return label, os.path.expanduser(source) if source.startswith("~/") else source


def about_evaluation(
    config: Config, benchmark: str, weights: str, num_generations: int, judged: bool, digests: Mapping[str, str]
) -> dict[str, Any]:
    """Describes an evaluation. Generations can be combined if and only if their descriptions are equal.

    The number of grading processes and the URL of the judge are omitted, because they do not affect the results. The
    model, the problems and the files that options name are also identified by their content, under "digests", because
    the content of a path can change.

    Args:
      config: The configuration.
      benchmark: Benchmark, as in --benchmarks.
      weights: Description of the weights, see `models.Model.weights`.
      num_generations: Number of generations per problem.
      judged: Whether the generations are clustered. Ignored if the configured judge does not provide clusters.
      digests: Digests of the model (`Model.digests`), the benchmark (`Benchmark.digests`) and the judge
        (`judge_identity`).

    Returns:
      The content of about.json.

    Raises:
      OSError: If a file cannot be read.
    """
    judge = config.judge
    sampling = dataclasses.asdict(Sampling(**config.sampling, seed=config.seed))
    del sampling["correlated"]  # always False; results of versions without this key remain comparable
    is_clustered = judged and JUDGES[judge.name].clusters
    clustering = {"name": judge.name, "model": judge.model, "options": dict(judge.options)}
    options = task_options(benchmark, config.task)
    files = option_digests("task_options", options)
    files |= option_digests("judge.options", judge.options) if is_clustered else {}
    about = {
        "benchmark": benchmark,
        "task_options": {key: value for key, value in options.items() if key != "num_workers"},
        "model": weights,
        "stop_strings": config.model.stop_strings,
        "num_generations": num_generations,
        "sampling": sampling,
        "judge": clustering if is_clustered else None,
        "digests": {**files, **digests},
    }
    if config.model.chat_template_options:
        about["chat_template_options"] = dict(config.model.chat_template_options)
    if config.task.system_prompt:
        about["system_prompt"] = config.task.system_prompt
    return json.loads(json.dumps(about))
