"""Base class of tasks with generated problems, which are divided into training and held-out problems."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from poly_epo_jax.config.checks import SEED, Range
from poly_epo_jax.types import Problem


@dataclasses.dataclass(kw_only=True, eq=False)
class SyntheticTask:
    """Base class of tasks with generated problems.

    Shuffles the items from which problems are generated. The first `num_train` items become training problems, the next
    `num_held_out` become held-out problems. Subclasses implement `items` and `problem`, and set the default numbers of
    problems.

    Attributes:
      seed: Seed of the shuffle.
      num_train: Number of training problems.
      num_held_out: Number of held-out problems.
      train_problems: Training problems.
      held_out_problems: Held-out problems.

    Raises:
      ValueError: If more problems are requested than there are items.
    """

    seed: Annotated[int, SEED] = 0
    num_train: Annotated[int, Range(0, 10**6)] = 0
    num_held_out: Annotated[int, Range(0, 10**6)] = 0
    train_problems: Sequence[Problem] = dataclasses.field(init=False, repr=False)
    held_out_problems: Sequence[Problem] = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        problems = self.drawn(self.items(), "num_train", "num_held_out")
        self.train_problems, self.held_out_problems = problems[: self.num_train], problems[self.num_train :]

    def drawn(self, items: Sequence[Any], *options: str) -> Sequence[Problem]:
        """Generates problems from randomly selected items.

        Args:
          items: Items from which problems can be generated.
          options: Attributes whose sum is the number of problems, for example `num_train`.

        Returns:
          The requested number of problems, in an order that `seed` determines.

        Raises:
          ValueError: If more problems are requested than there are items.
        """
        count = sum(getattr(self, option) for option in options)
        if count > len(items):
            requested = " and ".join(f"{option}={getattr(self, option)}" for option in options)
            raise ValueError(
                f"{requested}{' together' if len(options) > 1 else ''} must be at most {len(items)}, the number of "
                f"different problems of this task; lower {' or '.join(f'task.options.{name}' for name in options)}."
            )
        order = np.random.default_rng(self.seed).permutation(len(items))[:count]
        return tuple(self.problem(items[i]) for i in order)

    def items(self) -> Sequence[Any]:
        """Returns all items from which a problem can be generated."""
        raise NotImplementedError

    def problem(self, item: Any) -> Problem:
        """Returns the problem for an item."""
        raise NotImplementedError

    def same_answer(self, problem: Problem, first: str, second: str) -> bool:
        """Returns True if two answers are identical. Each answer has only one canonical form."""
        return first == second
