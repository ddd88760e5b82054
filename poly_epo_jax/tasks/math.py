r"""Mathematics with checkable answers, from any data set of problems: the answer in the last `\boxed{}` counts."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from poly_epo_jax.config.checks import NOT_EMPTY, Range
from poly_epo_jax.tasks.answers import last_boxed, mend
from poly_epo_jax.tasks.problems import Dropped, clean_problems, load_problems
from poly_epo_jax.tasks.verifier import Outcome, Verifier
from poly_epo_jax.types import Generation, Problem

SLOT = "{problem}"
MESSAGE = f"{SLOT}\n\nWork through the problem one step at a time, and write your final answer inside \\boxed{{}}."
MAX_ANSWER_LENGTH = 2_000


@dataclasses.dataclass(kw_only=True, eq=False)
class MathTask:
    """Problems from the sources `train` and `held_out`, which `data.read_rows` reads; `held_out` may name several.

    If answers stand at the end of worked solutions, `answer_marker` is the text before them (GSM8K's is "####"). A
    prompt is MESSAGE as the first message of a chat, or `template` as it stands, if one is given. Both contain
    `{problem}` where the problem goes. `dropped` counts, for `train` and `held_out`, the problems that
    `data.clean_problems` leaves out. Answers are compared by `num_workers` processes (0: one for every two CPU cores,
    and at least 2), each with `memory_gb` of memory and `cpu_seconds` of CPU time per answer.

    Raises:
      ValueError, OSError: a source cannot be read, an id names two problems, or a setting is out of range.
    """

    train: Annotated[str, NOT_EMPTY]
    held_out: str | Sequence[str] = ""
    problem_column: str = "problem"
    answer_column: str = "answer"
    id_column: str = "id"
    answer_marker: str = ""
    template: str = ""
    num_workers: Annotated[int, Range(0, 1024)] = 0
    cpu_seconds: Annotated[float, Range(0.1, 3600)] = 2.0
    memory_gb: Annotated[float, Range(0.1, 1024)] = 4.0
    train_problems: Sequence[Problem] = dataclasses.field(init=False, repr=False)
    held_out_problems: Sequence[Problem] = dataclasses.field(init=False, repr=False)
    dropped: dict[str, Dropped] = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        if self.template and self.template.count(SLOT) != 1:
            raise ValueError(f"template is {self.template!r}; it must hold {SLOT} once, where the problem goes.")
        sources = [self.held_out] if isinstance(self.held_out, str) else self.held_out
        held_out, dropped_held_out = clean_problems(self._load([source for source in sources if source]))
        train, dropped_train = clean_problems(self._load([self.train]), held_out)
        self.dropped = {"train": dropped_train, "held_out": dropped_held_out}
        self.train_problems, self.held_out_problems = (tuple(map(self._prompted, part)) for part in (train, held_out))
        self._verifier = Verifier(self.num_workers, self.cpu_seconds, self.memory_gb)

    def reward(self, problem: Problem, generation: Generation) -> float:
        r"""1 if the last `\boxed{}` of the response equals the answer, else 0; may be called from any thread."""
        answer = self.answer(problem, generation)
        if answer is None:
            return 0.0
        return float(self._verifier.compare(mend(problem.answer), mend(answer)) is Outcome.RIGHT)

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        r"""The content of the last `\boxed{}` in the response."""
        answer = last_boxed(generation.text)
        return answer if answer and len(answer) <= MAX_ANSWER_LENGTH else None

    def same_answer(self, problem: Problem, first: str, second: str) -> bool:
        """Whether two answers are equal as mathematics: 1/2 and 0.5 are one vote."""
        return self._verifier.compare(mend(first), mend(second)) is Outcome.RIGHT

    def metrics(self) -> dict[str, float]:
        """Answers that earned 0 since the last call because comparing them took too long, or ended a worker."""
        counts = self._verifier.take_counts()
        return {
            "grader/timeouts": float(counts[Outcome.TIMED_OUT]),
            "grader/crashes": float(counts[Outcome.CRASHED]),
        }

    def close(self) -> None:
        """Ends the processes that compare answers; they otherwise end with the task."""
        self._verifier.close()

    def _load(self, sources: Sequence[str]) -> list[Problem]:
        columns = (self.problem_column, self.answer_column, self.id_column)
        problems = [problem for source in sources for problem in load_problems(source, *columns)]
        if not self.answer_marker:
            return problems
        return [
            dataclasses.replace(problem, answer=problem.answer.rsplit(self.answer_marker, 1)[-1].strip())
            for problem in problems
        ]

    def _prompted(self, problem: Problem) -> Problem:
        prompt = (self.template or MESSAGE).replace(SLOT, problem.prompt)
        return dataclasses.replace(problem, prompt=prompt, chat=not self.template)
