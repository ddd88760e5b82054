"""Polynomial solving, where each point on the curve is a correct answer.

See the paper, §"Synthetic Domains with Infinitely Many Valid Strategies". The prompts and responses of `polynomial`
consist of the characters of a small alphabet. `polynomial_prose` is the same task in free text for pretrained models.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, ClassVar, TypeVar

import numpy as np

from poly_epo_jax.registry import Range
from poly_epo_jax.tasks.synthetic import CharacterTask, DemonstrationStyle, SyntheticTask
from poly_epo_jax.types import Generation, Problem

Number = TypeVar("Number", int, Fraction)

# Only canonical integers are accepted. Otherwise one point, such as y=11 and y=011, could count as several answers.
POINT = re.compile(r"\(x=(0|-?[1-9][0-9]?),y=(0|-?[1-9][0-9]{0,3})\)")
MAX_Y = 9999
MAX_PROBLEMS = 10**6

PROMPT = "Name real numbers x and y with {relation}. Any pair will do. End with the pair, such as (x=..., y=...)."
NUMBER = r"([-+]?[0-9]{1,12}(?:\.[0-9]{1,12})?(?:/[1-9][0-9]{0,11})?)"
PAIR = re.compile(rf"\bx ?= ?{NUMBER} ?(?:,|;| and) ?y ?= ?{NUMBER}(?![0-9/]|\.[0-9])|\( ?{NUMBER} ?, ?{NUMBER} ?\)")
MAX_CHARACTERS = 4000


@dataclasses.dataclass(kw_only=True, eq=False)
class PolynomialTask(CharacterTask):
    """Polynomial solving with prompts such as `y=x^2+3x+7:` and responses such as `(x=1,y=11)`.

    Every point on the curve earns a reward of 1 and is a separate strategy. Responses may contain any x of up to 2
    digits and any y of up to 4 digits. `Problem.answer` contains the coefficients, leading coefficient first, such as
    `1,3,7`.

    Attributes:
      degree: Degree of the polynomials.
      max_coefficient: Maximum absolute value of the coefficients of powers of x. The leading coefficient is not 0.
      max_constant: Maximum absolute value of the constant term.
      max_x: Maximum absolute value of x in demonstrations.
      num_train: Number of training problems.
      num_held_out: Number of held-out problems.
      alphabet: Characters of all prompts and demonstrations.

    Raises:
      ValueError: If y has more than 4 digits in a demonstration, there are more than `MAX_PROBLEMS` polynomials, or
        more problems are requested than exist.
    """

    degree: Annotated[int, Range(1, 3)] = 1
    max_coefficient: Annotated[int, Range(1, MAX_Y)] = 3
    max_constant: Annotated[int, Range(0, MAX_Y)] = 12
    max_x: Annotated[int, Range(0, 99)] = 9
    num_train: Annotated[int, Range(0, MAX_PROBLEMS)] = 110
    num_held_out: Annotated[int, Range(0, MAX_PROBLEMS)] = 40

    alphabet: ClassVar[str] = "0123456789xy=+-^(),:"

    def __post_init__(self):
        largest_y = self.max_coefficient * sum(self.max_x**k for k in range(1, self.degree + 1)) + self.max_constant
        if largest_y + 2 > MAX_Y:
            raise ValueError(
                f"demonstrations would reach y={largest_y}, but y must have at most 4 digits; "
                "lower max_x, max_coefficient or max_constant."
            )
        num_polynomials = 2 * self.max_coefficient * (2 * self.max_coefficient + 1) ** (self.degree - 1)
        if num_polynomials * (2 * self.max_constant + 1) > MAX_PROBLEMS:
            raise ValueError(
                f"max_coefficient={self.max_coefficient} and max_constant={self.max_constant} result in more than "
                f"{MAX_PROBLEMS:,} problems; lower one of them."
            )
        super().__post_init__()

    def items(self) -> Sequence[Sequence[int]]:
        """Returns the coefficients of all polynomials."""
        return coefficients(self.degree, self.max_coefficient, self.max_constant)

    def problem(self, item: Sequence[int]) -> Problem:
        """Returns the problem for the coefficients of a polynomial."""
        relation = f"y={polynomial_text(item)}"
        return Problem(id=f"polynomial/{relation}", prompt=f"{relation}:", answer=",".join(map(str, item)))

    def reward(self, problem: Problem, generation: Generation) -> float:
        """Returns 1 for a point on the curve, otherwise 0."""
        point = self.strategy(problem, generation)
        return float(point is not None and point[1] == polynomial_value(problem.answer, point[0]))

    def strategy(self, problem: Problem, generation: Generation) -> tuple[int, int] | None:
        """Returns the point (x, y), whether correct or not, or None if the response is not a point."""
        match = POINT.fullmatch(generation.text)
        return (int(match[1]), int(match[2])) if match else None

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """Returns the text of the point, which is canonical, or None if the response is not a point."""
        return generation.text if POINT.fullmatch(generation.text) else None

    def strategies(self, problem: Problem) -> list[tuple[int, int]]:
        """Returns the demonstrated points, ordered by rank: x = 0, 1, -1, 2, -2, ..."""
        return [(x, polynomial_value(problem.answer, x)) for x in map(_x_of_rank, range(2 * self.max_x + 1))]

    def demonstration(self, problem: Problem, rng: np.random.Generator, style: DemonstrationStyle) -> str:
        """Draws a demonstration for fitting a base policy.

        With probability `0.1 + 0.03 * abs(x)` (0.02 for x = 0), scaled by `style.error_rate`, y is off by 1 or 2.

        Args:
          problem: Problem to demonstrate.
          rng: Random generator.
          style: Error rate and distribution of strategies.

        Returns:
          The text of the response.
        """
        x = _x_of_rank(style.choose(np.arange(2 * self.max_x + 1), rng))
        y = polynomial_value(problem.answer, x)
        if style.draw_mistake(0.1 + 0.03 * abs(x) if x else 0.02, rng):
            y += int(rng.choice((-2, -1, 1, 2)))
        return f"(x={x},y={y})"


def coefficients(degree: int, largest: int, largest_constant: int) -> list[tuple[int, ...]]:
    """Lists the coefficients of all polynomials of a degree.

    Args:
      degree: Degree of the polynomials.
      largest: Maximum absolute value of the coefficients of powers of x.
      largest_constant: Maximum absolute value of the constant term.

    Returns:
      One tuple of `degree + 1` coefficients per polynomial, leading coefficient first and not 0.
    """
    powers, constants = range(-largest, largest + 1), range(-largest_constant, largest_constant + 1)
    return [c for c in itertools.product(*[powers] * degree, constants) if c[0]]


def polynomial_text(coefficients: Sequence[int]) -> str:
    """Formats a polynomial, leading coefficient first, such as x^2+3x+7."""
    text = ""
    for power, coefficient in zip(reversed(range(len(coefficients))), coefficients, strict=True):
        if coefficient:
            variable = ("", "x", f"x^{power}")[min(power, 2)]
            size = "" if variable and abs(coefficient) == 1 else abs(coefficient)
            text += f"{'-' if coefficient < 0 else '+'}{size}{variable}"
    return text.removeprefix("+")


def _x_of_rank(rank: int) -> int:
    return (rank + 1) // 2 if rank % 2 else -(rank // 2)


def polynomial_value(coefficients: str, x: Number) -> Number:
    """Evaluates a polynomial.

    Args:
      coefficients: Comma-separated coefficients, leading coefficient first, as in `Problem.answer`.
      x: Point at which the polynomial is evaluated.

    Returns:
      The value y, of the same type as x.
    """
    y = 0 * x
    for coefficient in coefficients.split(","):
        y = y * x + int(coefficient)
    return y


@dataclasses.dataclass(kw_only=True, eq=False)
class PolynomialProseTask(SyntheticTask):
    """Polynomial solving with free-text responses, in which the last pair of numbers is the answer.

    Every point on the curve earns a reward of 1 and is a separate strategy. Numbers may be integers, decimals or
    fractions and are compared exactly: (x=0.5, y=1/4) and (1/2, 0.25) are the same point. `Problem.answer` contains the
    coefficients, leading coefficient first, such as `1,3,7`.

    Attributes:
      degree: Degree of the polynomials.
      max_coefficient: Maximum absolute value of the coefficients of powers of x. The leading coefficient is not 0.
      max_constant: Maximum absolute value of the constant term.
      num_train: Number of training problems.
      num_held_out: Number of held-out problems.

    Raises:
      ValueError: If more problems are requested than exist.
    """

    degree: Annotated[int, Range(1, 3)] = 2
    max_coefficient: Annotated[int, Range(1, 99)] = 9
    max_constant: Annotated[int, Range(0, 99)] = 20
    num_train: Annotated[int, Range(0, 10**6)] = 6_000
    num_held_out: Annotated[int, Range(0, 10**6)] = 200

    def items(self) -> Sequence[Sequence[int]]:
        """Returns the coefficients of all polynomials."""
        return coefficients(self.degree, self.max_coefficient, self.max_constant)

    def problem(self, item: Sequence[int]) -> Problem:
        """Returns the problem for the coefficients of a polynomial."""
        relation = f"y = {polynomial_text(item)}"
        return Problem(
            id=f"polynomial_prose/{relation.replace(' ', '')}",
            prompt=PROMPT.format(relation=relation),
            answer=",".join(map(str, item)),
            chat=True,
        )

    def reward(self, problem: Problem, generation: Generation) -> float:
        """Returns 1 for a point on the curve, otherwise 0."""
        point = self.strategy(problem, generation)
        return float(point is not None and point[1] == polynomial_value(problem.answer, point[0]))

    def strategy(self, problem: Problem, generation: Generation) -> tuple[Fraction, Fraction] | None:
        """Returns the last pair (x, y) in the last `MAX_CHARACTERS` characters, whether correct or not.

        Returns None if these characters do not contain a pair.
        """
        pairs = PAIR.findall(generation.text[-MAX_CHARACTERS:].replace("\N{MINUS SIGN}", "-").replace("$", ""))
        if not pairs:
            return None
        x, y = (_number(text) for text in pairs[-1] if text)
        return x, y

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """Returns the pair with both numbers in lowest terms, or None if there is no pair."""
        point = self.strategy(problem, generation)
        return point and f"({point[0]}, {point[1]})"


def _number(text: str) -> Fraction:
    over, _, under = text.partition("/")
    return Fraction(over) / Fraction(under or 1)
