"""The paper's benchmarks by name, and any file or data set by its own name; a synthetic task is its own benchmark."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from poly_epo_jax.config.keys import Config, TaskSection
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.tasks import TASKS, MathTask
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
"""MathTask's options for each name: where to find it on the Hugging Face hub, and the names of its columns."""


@dataclasses.dataclass
class Benchmark:
    """A benchmark's label, the task that grades it, and its problems."""

    label: str
    task: Task
    problems: Sequence[Problem]


def open_benchmark(name: str, section: TaskSection) -> Benchmark:
    """Opens the benchmark that `name` stands for.

    Args:
      name: a key of BENCHMARKS; a synthetic task, which is evaluated on its held-out problems; or what `data.read_rows`
        reads, such as a .jsonl file with columns `problem` and `answer`. `label=name` gives it another label.
      section: a configuration's; it gives the options of the task it names, and the template of mathematical prompts.

    Raises:
      ValueError, OSError: it cannot be read.
    """
    source, options = name.rpartition("=")[2], task_options(name, section)
    if source in TASKS and source != "math":
        task = TASKS[source](**options)
        return Benchmark(benchmark_label(name), task, task.held_out_problems)
    task = MathTask(**options)
    return Benchmark(benchmark_label(name), task, task.train_problems)


def task_options(name: str, section: TaskSection) -> dict[str, Any]:
    """The options of the task that grades the benchmark; the arguments are those of `open_benchmark`."""
    source = name.rpartition("=")[2]
    if source in TASKS and source != "math":
        return dict(section.options) if source == section.name else {}
    shared = {key: value for key, value in section.options.items() if key in ("template", "num_workers")}
    return BENCHMARKS.get(source, {"train": source}) | shared


def benchmark_label(name: str) -> str:
    """The label of a benchmark: given by `label=name`, else its name or its file's, without split and suffix."""
    return label_of(name) if "=" in name else label_of(name).split(":")[0].split(".")[0]


def label_of(name: str) -> str:
    """The label of a model: given by `label=name`, else the last part of its path."""
    label, _, source = name.rpartition("=")
    return label or source.rstrip("/").split("/")[-1]


def about_evaluation(
    config: Config, benchmark: str, weights: str, num_generations: int, judged: bool
) -> dict[str, Any]:
    """The description as it is read back from the file. Generations with equal descriptions have one distribution.

    The number of grading processes and the address of the judge's server are left out, as they change nothing.

    Args:
      weights: which weights, and which step or version of them.
      judged: whether to cluster the generations with the configuration's judge, if it clusters any.
    """
    judge = config.judge
    clustering = {"name": judge.name, "model": judge.model, "options": dict(judge.options)}
    options = task_options(benchmark, config.task)
    about = {
        "benchmark": benchmark,
        "task_options": {key: value for key, value in options.items() if key != "num_workers"},
        "model": weights,
        "stop_strings": config.model.stop_strings,
        "num_generations": num_generations,
        "sampling": dataclasses.asdict(Sampling(**config.sampling, seed=config.seed)),
        "judge": clustering if judged and JUDGES[judge.name].clusters else None,
    }
    return json.loads(json.dumps(about))
