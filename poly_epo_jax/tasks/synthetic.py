"""What tasks of made-up problems share: which problems are trained on, and which are held out."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from poly_epo_jax.config.checks import SEED, Range
from poly_epo_jax.types import Problem


@dataclasses.dataclass(kw_only=True, eq=False)
class SyntheticTask:
    """Shuffles the items that problems are made from by `seed`; the first are trained on, the next are held out.

    A subclass gives `items` and `problem`, and the numbers of problems their defaults.

    Raises:
      ValueError: more problems are requested than there are.
    """

    seed: Annotated[int, SEED] = 0
    num_train: Annotated[int, Range(0, 10**6)] = 0
    num_held_out: Annotated[int, Range(0, 10**6)] = 0
    train_problems: Sequence[Problem] = dataclasses.field(init=False, repr=False)
    held_out_problems: Sequence[Problem] = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        problems = self.drawn(self.items(), self.num_train + self.num_held_out)
        self.train_problems, self.held_out_problems = problems[: self.num_train], problems[self.num_train :]

    def drawn(self, items: Sequence[Any], count: int) -> Sequence[Problem]:
        if count > len(items):
            raise ValueError(
                f"num_train={self.num_train} and num_held_out={self.num_held_out} must add up to at most {len(items)}, "
                "the number of problems of this difficulty."
            )
        order = np.random.default_rng(self.seed).permutation(len(items))[:count]
        return tuple(self.problem(items[i]) for i in order)

    def items(self) -> Sequence[Any]:
        """Everything that a problem can be made from."""
        raise NotImplementedError

    def problem(self, item: Any) -> Problem:
        """The problem made from an item."""
        raise NotImplementedError

    def same_answer(self, problem: Problem, first: str, second: str) -> bool:
        """Answers are written in one way only."""
        return first == second
