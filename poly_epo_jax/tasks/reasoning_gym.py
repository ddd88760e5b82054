"""Generated problems of the package reasoning-gym, which also scores their answers."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from poly_epo_jax.config.checks import NOT_EMPTY, SEED
from poly_epo_jax.registry import Range
from poly_epo_jax.system.missing_packages import install_command
from poly_epo_jax.tasks.grader import Grader
from poly_epo_jax.tasks.problems import SLOT, Dropped, check_template, clean_problems, prompted
from poly_epo_jax.tasks.verifier import GradedInWorkers, Verifier, worker_environment
from poly_epo_jax.types import Generation, Problem

WORKER = Path(__file__).with_name("gym_worker.py")
MESSAGE = f"{SLOT}\n\nWork through the problem step by step, and write only your answer between <answer> and </answer>."
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


@dataclasses.dataclass(kw_only=True, eq=False)
class ReasoningGymTask(GradedInWorkers):
    """Problems of a dataset of reasoning-gym.

    The final answer of a response is the text between the last pair of `<answer>` and `</answer>`, without surrounding
    whitespace. A response without such a pair, or with nothing between its tags, has no answer and the reward 0.

    Training and held-out problems have different seeds, which are derived from `seed`, so neither part depends on the
    size of the other. Problems that occur several times, or that the package cannot answer, are removed and counted.

    Attributes:
      dataset: Name of the dataset in reasoning-gym.
      dataset_options: Options of the dataset other than `seed` and `size`.
      seed: Seed of the problems.
      num_train: Number of training problems, before duplicates are removed.
      num_held_out: Number of held-out problems, before duplicates are removed.
      threshold: Minimum score of a correct response. The scorers return up to 0.5 for incorrect answers.
      raw_score: Whether the reward is the score. By default, it is 1 for a correct response and otherwise 0.
      template: Prompt text that contains `{problem}` once, see `MathTask`. If empty, the prompt is the chat message
        `MESSAGE`.
      num_workers: Number of processes that score answers. 0 starts one for every two CPU cores that this process may
        use, but at least 2.
      cpu_seconds: CPU time limit for scoring an answer, in seconds.
      memory_gb: Memory limit of each process, in GiB. It is only enforced on Linux.
      correct_from: Minimum reward of a correct response.
      train_problems: Training problems.
      held_out_problems: Held-out problems.
      dropped: Numbers of problems that were removed from "train" and "held_out", by reason.

    Raises:
      ImportError: If reasoning-gym is not installed.
      ValueError: If the dataset or one of its options does not exist, no problem can be generated, or
        `template` does not contain `{problem}` exactly once.
    """

    dataset: Annotated[str, NOT_EMPTY]
    dataset_options: Mapping[str, Any] | None = None
    seed: Annotated[int, SEED] = 0
    num_train: Annotated[int, Range(0, 10**6)] = 1000
    num_held_out: Annotated[int, Range(0, 10**6)] = 100
    threshold: Annotated[float, Range(0.01, 1)] = 1.0
    raw_score: bool = False
    template: str = ""
    num_workers: Annotated[int, Range(0, 1024)] = 0
    cpu_seconds: Annotated[float, Range(0.1, 3600)] = 2.0
    memory_gb: Annotated[float, Range(0.1, 1024)] = 4.0

    def __post_init__(self):
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ImportError(
                "task.name=reasoning_gym requires the package reasoning-gym; install it with: "
                f"{install_command('reasoning-gym')} (its dependency pycosat requires a C compiler)"
            )
        check_template(self.template)
        self.correct_from: float = self.threshold if self.raw_score else 1.0
        self._entries: dict[str, str] = {}
        self._command = (str(WORKER), self.dataset, json.dumps(self.dataset_options or {}))
        self._verifier = Verifier(
            self.num_workers, self.cpu_seconds, self.memory_gb, Grader("reasoning-gym", self._command)
        )
        lines = self._generate()
        held_out, dropped_held_out = self._usable("held_out", lines[: self.num_held_out])
        train, dropped_train = self._usable("train", lines[self.num_held_out :], held_out)
        self.dropped: dict[str, Dropped] = {"train": dropped_train, "held_out": dropped_held_out}
        self.train_problems: Sequence[Problem] = prompted(train, self.template, MESSAGE)
        self.held_out_problems: Sequence[Problem] = prompted(held_out, self.template, MESSAGE)

    def reward(self, problem: Problem, generation: Generation) -> float:
        """Returns 1 if the score of the final answer reaches the threshold, otherwise 0, or the score. Thread-safe."""
        answer = self.answer(problem, generation)
        reply = None if answer is None else self._verifier.call(self._entries[problem.id], answer)
        score = reply if isinstance(reply, float) else 0.0  # the scorer raised an exception, or exceeded its limits
        return score if self.raw_score else float(score >= self.threshold)

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """Returns the final answer, or None if it is missing or empty."""
        return last_tagged(generation.text)

    def _generate(self) -> list[list[str] | str]:
        """Returns the held-out and the training problems, or the errors for unusable problems."""
        sizes = (self.num_held_out, self.num_train)
        seeds = np.random.SeedSequence(self.seed).generate_state(2) >> 1  # the datasets add the index of the problem
        parts = [str(value) for pair in zip(seeds, sizes, strict=True) if pair[1] for value in pair]
        command = (sys.executable, "-P", *self._command, *parts)
        ended = subprocess.run(
            command, env=worker_environment() | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True
        )
        lines = [json.loads(line) for line in ended.stdout.splitlines()] if ended.returncode == 0 else []
        if ended.returncode or (lines and not any(isinstance(line, list) for line in lines)):
            reason = lines[-1] if lines else ended.stderr.strip().rpartition("\n")[2]
            raise ValueError(
                f"task.options.dataset={self.dataset!r} with dataset_options={self.dataset_options} cannot be "
                f"generated: {reason}; correct the name or the options."
            )
        return lines

    def _usable(
        self, part: str, lines: Sequence[list[str] | str], held_out: Sequence[Problem] = ()
    ) -> tuple[list[Problem], Dropped]:
        problems = []
        for index, line in enumerate(lines):
            if isinstance(line, list):
                question, answer, entry = line
                problems.append(Problem(f"{self.dataset}/{part}/{index}", question, answer))
                self._entries[problems[-1].id] = entry
        kept, dropped = clean_problems(problems, lambda *_: True, held_out)
        return kept, dropped + Dropped(unusable_answer=len(lines) - len(problems))


def last_tagged(text: str) -> str | None:
    """Returns the text in the last pair of `<answer>` and `</answer>`, or None if it is missing or blank."""
    answers = ANSWER.findall(text)
    return answers[-1].strip() or None if answers else None
