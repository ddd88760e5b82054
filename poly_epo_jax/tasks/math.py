r"""Mathematics problems from any dataset, rewarded if the answer in the last `\boxed{}` of the response is correct."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from poly_epo_jax.config.checks import FRACTION, Check
from poly_epo_jax.registry import Range
from poly_epo_jax.system.json_files import read_object
from poly_epo_jax.tasks.answers import MAX_ANSWER_LENGTH, last_boxed, visible
from poly_epo_jax.tasks.problems import (
    SLOT,
    Dropped,
    check_source,
    check_template,
    clean_problems,
    load_problems,
    prompted,
    source_name,
)
from poly_epo_jax.tasks.verifier import GradedInWorkers, Outcome, Verifier
from poly_epo_jax.types import Generation, Problem

SOURCES = Check(lambda given: bool(given) and all(map(str.strip, _sources(given))), "must not be empty")
MESSAGE = f"{SLOT}\n\nWork through the problem one step at a time, and write your final answer inside \\boxed{{}}."


@dataclasses.dataclass(kw_only=True, eq=False)
class MathTask(GradedInWorkers):
    """Mathematics problems whose answers are compared with math-verify.

    Attributes:
      train: Source or sources of the training problems, in the format of `problems.read_source`.
      held_out: Source or sources of the held-out problems, in the same format.
      weights: Relative number of prompts from each source of `train`. If empty, each problem is drawn equally often.
      problem_column: Column that contains the problem text.
      answer_column: Column that contains the reference answer: text, a number, a list with one of them, or a dict with
        the key `ground_truth`. Rows with any other answer are removed and counted, see `problems.Dropped`.
      id_column: Column that contains the problem id.
      answer_marker: Text before the answer in a worked solution, such as "####" in GSM8K. Empty if the answer column
        contains only answers.
      keep: results.json of an evaluation on the training problems. If not empty, training only uses the problems whose
        pass rate in this file lies in [`keep_min`, `keep_max`].
      keep_min: Minimum pass rate. The default excludes problems without a correct response.
      keep_max: Maximum pass rate. The default excludes problems with only correct responses.
      template: Prompt text that contains `{problem}` once. If empty, the prompt is the chat message `MESSAGE`. The
        template may contain control tokens. Their names in a problem are encoded as plain text.
      num_workers: Number of processes that compare answers. 0 starts one for every two CPU cores that this process
        may use, but at least 2.
      cpu_seconds: CPU time limit of one comparison, in seconds.
      memory_gb: Memory limit of each process, in GiB. It is only enforced on Linux.
      train_problems: Problems of `train` after `problems.clean_problems`.
      held_out_problems: Problems of `held_out` after `problems.clean_problems`.
      source_weights: `weights` by the names of the sources, see `types.Mixed`.
      dropped: Numbers of problems that were removed from "train" and "held_out", by reason.

    Raises:
      ValueError: If a source or `keep` is malformed, two problems of one part have the same id, or `template` does
        not contain `{problem}` exactly once, or `weights` does not have a weight for each source.
      OSError: If a source is missing or unreachable, or if a process that compares answers cannot start.
    """

    train: Annotated[str | Sequence[str], SOURCES]
    held_out: str | Sequence[str] = ""
    weights: Sequence[float] = ()
    problem_column: str = "problem"
    answer_column: str = "answer"
    id_column: str = "id"
    answer_marker: str = ""
    keep: str = ""
    keep_min: Annotated[float, FRACTION] = 1e-6
    keep_max: Annotated[float, FRACTION] = 1 - 1e-6
    template: str = ""
    num_workers: Annotated[int, Range(0, 1024)] = 0
    cpu_seconds: Annotated[float, Range(0.1, 3600)] = 2.0
    memory_gb: Annotated[float, Range(0.1, 1024)] = 4.0

    def __post_init__(self):
        check_template(self.template)
        self._verifier = Verifier(self.num_workers, self.cpu_seconds, self.memory_gb)
        held_out_sources, sources = _sources(self.held_out), _sources(self.train)
        self.source_weights = dict(zip(map(source_name, sources), map(float, self.weights), strict=False))
        if self.weights and not len(self.source_weights) == len(self.weights) == len(sources):
            raise ValueError(
                f"task.options.weights={self.weights} must have one weight for each of the {len(sources)} sources of "
                "task.options.train, whose names must differ; correct the weights, or rename files."
            )
        held_out_sources = [source for source in held_out_sources if source]
        for source in (*held_out_sources, *sources):  # before a dataset is downloaded
            check_source(source)
        held_out, dropped_held_out = self._load(held_out_sources)
        train, dropped_train = self._load(sources, held_out)
        if self.keep:
            train, outside = _with_pass_rate(train, Path(self.keep), self.keep_min, self.keep_max)
            dropped_train += outside
        self.dropped: dict[str, Dropped] = {"train": dropped_train, "held_out": dropped_held_out}
        self.train_problems: Sequence[Problem] = prompted(train, self.template, MESSAGE)
        self.held_out_problems: Sequence[Problem] = prompted(held_out, self.template, MESSAGE)
        self._verifier.take_counts()  # comparisons of reference answers are not metrics of the first step

    def reward(self, problem: Problem, generation: Generation) -> float:
        r"""Returns 1 if the last `\boxed{}` of the response equals the reference answer, otherwise 0. Thread-safe."""
        answer = self.answer(problem, generation)
        return float(answer is not None and self.same_answer(problem, problem.answer, answer))

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        r"""Returns the content of the last `\boxed{}`, or None if it is missing, empty or too long."""
        answer = last_boxed(visible(generation.text))
        return answer if answer and len(answer) <= MAX_ANSWER_LENGTH else None

    def same_answer(self, problem: Problem, first: str, second: str) -> bool:
        """Returns True if two answers are mathematically equal, such as 1/2 and 0.5."""
        return self._verifier.compare(first, second) is Outcome.RIGHT

    def _load(self, sources: Sequence[str], held_out: Sequence[Problem] = ()) -> tuple[list[Problem], Dropped]:
        loaded = [
            load_problems(source, self.problem_column, self.answer_column, self.id_column, self.answer_marker)
            for source in sources
        ]
        kept, dropped = clean_problems([one for part, _ in loaded for one in part], self.same_answer, held_out)
        return kept, sum((unusable for _, unusable in loaded), start=dropped)


def _sources(given: str | Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


def _with_pass_rate(
    problems: Sequence[Problem], file: Path, minimum: float, maximum: float
) -> tuple[list[Problem], Dropped]:
    """Returns the problems whose pass rate in an evaluation's results.json is in a range, and counts the others."""
    try:
        rates = {
            str(row["problem"]): row["num_correct"] / row["num_generations"]
            for row in read_object(file, "select another file")["per_problem"]
        }
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        raise ValueError(
            f"task.options.keep={file} has no pass rates of problems; set it to results.json of an evaluation on the "
            "training problems."
        ) from None
    kept = [problem for problem in problems if minimum <= rates.get(problem.id, -1) <= maximum]
    missing = sum(problem.id not in rates for problem in problems)
    return kept, Dropped(pass_rate=len(problems) - len(kept) - missing, no_pass_rate=missing)
