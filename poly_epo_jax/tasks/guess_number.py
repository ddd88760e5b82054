"""Guess the number: find a secret number with a few guesses, each of which is answered by "<" or ">".

The prompts and turns consist of the characters of a small alphabet. No strategy finds every number: a policy that
always plays the same strategy finds the same 2^guesses - 1 numbers of a range, and never finds the others.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np

from poly_epo_jax.registry import Range
from poly_epo_jax.tasks.synthetic import CharacterTask, DemonstrationStyle
from poly_epo_jax.types import Generation, Outcome, Problem

LOWEST, HIGHEST = 10, 99
"""Smallest and largest number, so that all numbers have two digits."""

PARTS = (2, 1, 3, 0, 4)
"""Fifths of a range, in the order of their rank in demonstrations: the middle first."""

Item = tuple[int, int, int]


@dataclasses.dataclass(kw_only=True, eq=False)
class GuessNumberTask(CharacterTask):
    """Guess the number, an environment with prompts such as `20-59`, turns such as `42` and replies `<` or `>`.

    The prompt contains the smallest and the largest possible number. The reply `<` means that the secret number is
    smaller than the guess. An episode ends with the secret number, with the last guess, or with a turn that is not a
    number of two digits. The strategy of an episode is its first guess. By default, the base policy is fitted to
    problems that are neither trained on nor held out. `Problem.answer` contains the secret number.

    Attributes:
      guesses: Maximum number of guesses.
      smallest: Minimum number of possible numbers.
      largest: Maximum number of possible numbers.
      num_train: Number of training problems.
      num_held_out: Number of held-out problems.
      num_demonstrated: Number of problems that are only demonstrated to the base policy.

    Raises:
      ValueError: If `smallest` is greater than `largest`, or more problems are requested than exist.
    """

    guesses: Annotated[int, Range(1, 20)] = 4
    smallest: Annotated[int, Range(5, HIGHEST - LOWEST + 1)] = 20
    largest: Annotated[int, Range(5, HIGHEST - LOWEST + 1)] = 60
    num_train: Annotated[int, Range(0, 10**6)] = 3000
    num_held_out: Annotated[int, Range(0, 10**6)] = 200
    num_demonstrated: Annotated[int, Range(0, 10**6)] = 20_000

    alphabet: ClassVar[str] = "0123456789-<>"

    def __post_init__(self):
        if self.smallest > self.largest:
            raise ValueError(f"smallest={self.smallest} is greater than largest={self.largest}; lower it.")
        super().__post_init__()

    def items(self) -> Sequence[Item]:
        """Returns all problems: lowest, highest and secret number."""
        return [
            (low, low + size - 1, secret)
            for size in range(self.smallest, self.largest + 1)
            for low in range(LOWEST, HIGHEST - size + 2)
            for secret in range(low, low + size)
        ]

    def problem(self, item: Item) -> Problem:
        """Returns the problem for a lowest, highest and secret number."""
        low, high, secret = item
        return Problem(id=f"guess_number/{low}-{high}={secret}", prompt=f"{low}-{high}", answer=str(secret))

    def start(self, problem: Problem, seed: int) -> "GuessNumberEpisode":
        """Starts an episode, which does not depend on the seed."""
        return GuessNumberEpisode(int(problem.answer), self.guesses)

    def demonstration(self, problem: Problem, rng: np.random.Generator, style: DemonstrationStyle) -> tuple[str, ...]:
        """Draws a demonstration for fitting a base policy.

        The first guess is drawn from a fifth of the range, see `PARTS`, and each later guess from all numbers that are
        still possible. With probability 0.3 `style.error_rate`, a later guess is drawn from the whole range instead.

        Args:
          problem: Problem to demonstrate.
          rng: Random generator.
          style: Error rate and distribution of first guesses.

        Returns:
          Alternating guesses and replies.
        """
        low, high = map(int, problem.prompt.split("-"))
        secret, part = int(problem.answer), PARTS[style.choose(np.arange(len(PARTS)), rng)]
        bounds = np.linspace(low, high + 1, len(PARTS) + 1).astype(int)
        guess, turns, possible = int(rng.integers(bounds[part], bounds[part + 1])), [], (low, high)
        for _ in range(self.guesses):
            turns.append(str(guess))
            if guess == secret:
                break
            turns.append(hint(secret, guess))
            first, last = possible
            possible = (first, min(last, guess - 1)) if secret < guess else (max(first, guess + 1), last)
            first, last = (low, high) if style.draw_mistake(0.3, rng) else possible
            guess = int(rng.integers(first, last + 1))
        return tuple(turns[: 2 * self.guesses - 1])


@dataclasses.dataclass(eq=False)
class GuessNumberEpisode:
    """An episode of `GuessNumberTask`.

    Attributes:
      secret: Secret number.
      max_guesses: Maximum number of guesses.
      guesses: Guesses so far.
      malformed: Whether the last turn was not a number of two digits.
    """

    secret: int
    max_guesses: int
    guesses: list[int] = dataclasses.field(default_factory=list)
    malformed: bool = False

    async def reply(self, generation: Generation) -> str | None:
        """Returns the answer to the last guess, or None if the episode is over."""
        turn = generation.turns[-1]
        if not re.fullmatch("[1-9][0-9]", turn):
            self.malformed = True
            return None
        self.guesses.append(int(turn))
        if self.guesses[-1] == self.secret or len(self.guesses) == self.max_guesses:
            return None
        return hint(self.secret, self.guesses[-1])

    async def close(self) -> Outcome:
        """Returns reward 1 if the number was found, otherwise 0, and the first guess as the strategy."""
        found = self.secret in self.guesses
        return Outcome(
            reward=float(found),
            strategy=self.guesses[0] if self.guesses else None,
            correct=found,
            metrics={"guesses": float(len(self.guesses)), "malformed": float(self.malformed)},
        )


def hint(secret: int, guess: int) -> str:
    """Returns "<" if the secret number is smaller than the guess, otherwise ">"."""
    return "<" if secret < guess else ">"
