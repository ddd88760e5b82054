"""Base classes of tasks with generated problems, and the style of the demonstrations that fit a base policy to them."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from jaxtyping import Real

from poly_epo_jax.config.checks import SEED
from poly_epo_jax.registry import Range
from poly_epo_jax.types import Problem


@dataclasses.dataclass(frozen=True)
class DemonstrationStyle:
    """Error rate and strategy distribution of demonstrations.

    Attributes:
      error_rate: Non-negative multiplier of the task's probability of a deliberate mistake. 0 disables mistakes, 1 uses
        the task's own probability.
      skew: Non-negative preference for strategies of low rank or cost. The strategy of rank or cost k has the weight
        exp(-skew k), so 0 makes all strategies equally likely.
    """

    error_rate: float = 0.0
    skew: float = 0.0

    def choose(self, costs: Real[np.ndarray, " S"], rng: np.random.Generator) -> int:
        """Draws the index of a strategy, which has the weight exp(-skew cost).

        Args:
          costs: Costs of the S strategies, such as their ranks.
          rng: Random generator.
        """
        weights = np.exp(-self.skew * costs)
        return int(rng.choice(len(costs), p=weights / weights.sum()))

    def draw_mistake(self, probability: float, rng: np.random.Generator) -> bool:
        """Draws whether a demonstration contains a mistake.

        Args:
          probability: Probability of a mistake in the task's own demonstrations. It is multiplied by `error_rate`.
          rng: Random generator.

        Returns:
          True with probability `error_rate * probability`.
        """
        return bool(rng.random() < self.error_rate * probability)


@dataclasses.dataclass(kw_only=True, eq=False)
class SyntheticTask:
    """Base class of tasks with generated problems.

    Shuffles the items from which problems are generated. The first `num_train` items become training problems. The last
    `num_held_out` items become held-out problems, which therefore do not depend on `num_train`. Subclasses implement
    `items` and `problem`, and set the default numbers of problems.

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

    def __post_init__(self):
        self.divide(self.shuffled(self.items(), "num_train", "num_held_out"))

    def divide(self, items: Sequence[Any]) -> None:
        """Generates the training and held-out problems from shuffled items."""
        self.train_problems: Sequence[Problem] = tuple(map(self.problem, items[: self.num_train]))
        self.held_out_problems: Sequence[Problem] = tuple(map(self.problem, items[len(items) - self.num_held_out :]))

    def shuffled(self, items: Sequence[Any], *options: str) -> list[Any]:
        """Returns the items in an order that `seed` determines.

        Args:
          items: Items from which problems can be generated.
          options: Attributes whose sum is the number of requested problems, for example `num_train`.

        Returns:
          All items, in an order that `seed` determines.

        Raises:
          ValueError: If more problems are requested than there are items.
        """
        if sum(getattr(self, option) for option in options) > len(items):
            requested = " and ".join(f"{option}={getattr(self, option)}" for option in options)
            raise ValueError(
                f"{requested}{' together' if len(options) > 1 else ''} must be at most {len(items)}, the number of "
                f"different problems of this task; lower {' or '.join(f'task.options.{name}' for name in options)}."
            )
        return [items[i] for i in np.random.default_rng(self.seed).permutation(len(items))]

    def items(self) -> Sequence[Any]:
        """Returns all items from which a problem can be generated."""
        raise NotImplementedError

    def problem(self, item: Any) -> Problem:
        """Returns the problem for an item."""
        raise NotImplementedError


@dataclasses.dataclass(kw_only=True, eq=False)
class CharacterTask(SyntheticTask):
    """Base class of synthetic tasks for tiny policies, which read and write the characters of a small alphabet.

    Attributes:
      num_demonstrated: Number of problems that are only demonstrated to the base policy: the last items of the shuffled
        order, which the held-out items precede. 0 demonstrates the training and the held-out problems instead.
      demonstrated_problems: Problems whose demonstrations the base policy is fitted to.
      alphabet: Characters of all prompts and demonstrations.
    """

    num_demonstrated: Annotated[int, Range(0, 10**6)] = 0

    alphabet: ClassVar[str]

    def __post_init__(self):
        demonstrated = ("num_demonstrated",) if self.num_demonstrated else ()
        items = self.shuffled(self.items(), "num_train", "num_held_out", *demonstrated)
        others = len(items) - self.num_demonstrated
        self.divide(items[:others])
        own = tuple(map(self.problem, items[others:]))
        self.demonstrated_problems: Sequence[Problem] = own or (*self.train_problems, *self.held_out_problems)
