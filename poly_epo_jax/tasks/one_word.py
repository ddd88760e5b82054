"""Tasks that one word answers, where many words are right and all are listed: the base of categories and prefixes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from poly_epo_jax.checks import SEED, Range
from poly_epo_jax.tasks.splits import split
from poly_epo_jax.tasks.word_lists import normal_form, word_list
from poly_epo_jax.types import Generation, Problem


@dataclasses.dataclass(kw_only=True, eq=False)
class OneWordTask:
    """Every right word earns 1 and is a strategy of its own; case, articles and the plural make no difference.

    The words are in tasks/words/, whose files name their source. The held-out headings are always the same; if fewer
    problems are requested than there are, the seed draws them. A problem's `answer` holds the heading of its list.

    Raises:
      ValueError: more problems are requested than there are.
    """

    seed: Annotated[int, SEED] = 0
    num_train: Annotated[int, Range(0, 1000)] = 0
    num_held_out: Annotated[int, Range(0, 1000)] = 0
    train_problems: Sequence[Problem] = dataclasses.field(init=False, repr=False)
    held_out_problems: Sequence[Problem] = dataclasses.field(init=False, repr=False)

    name: ClassVar[str]
    prompt: ClassVar[str]

    def __post_init__(self):
        train, held_out = word_list(f"{self.name}_train"), word_list(f"{self.name}_held_out")
        self._words: Mapping[str, Mapping[str, str]] = {**train, **held_out}
        self.train_problems = self._problems(list(train), self.num_train)
        self.held_out_problems = self._problems(list(held_out), self.num_held_out)

    def reward(self, problem: Problem, generation: Generation) -> float:
        """1 for a word of the list, else 0."""
        return float(self.strategy(problem, generation) in self._words[problem.answer].values())

    def strategy(self, problem: Problem, generation: Generation) -> str | None:
        """The word, right or wrong, in its normal form. None for anything but a word."""
        return normal_form(generation.text, self._words[problem.answer])

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """The same word as `strategy`."""
        return self.strategy(problem, generation)

    def same_answer(self, problem: Problem, first: str, second: str) -> bool:
        return first == second

    def _problems(self, headings: Sequence[str], count: int) -> Sequence[Problem]:
        chosen, _ = split(headings, seed=self.seed, num_train=count, num_held_out=0)
        return tuple(Problem(f"{self.name}/{heading}", self.prompt.format(heading), heading) for heading in chosen)
