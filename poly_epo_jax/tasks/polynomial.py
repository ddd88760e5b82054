"""Polynomial solving: name a point on the curve (paper §"Synthetic Domains with Infinitely Many Valid Strategies")."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, ClassVar, TypeVar

import numpy as np

from poly_epo_jax.config.checks import Range
from poly_epo_jax.tasks.demonstrations import Demonstrations
from poly_epo_jax.tasks.synthetic import SyntheticTask
from poly_epo_jax.types import Generation, Problem

Number = TypeVar("Number", int, Fraction)

# Canonical integers only: if `y=011` were read as 11, one answer could pass for many.
POINT = re.compile(r"\(x=(0|-?[1-9][0-9]?),y=(0|-?[1-9][0-9]{0,3})\)")
MAX_Y = 9999
MAX_PROBLEMS = 10**6


@dataclasses.dataclass(kw_only=True, eq=False)
class PolynomialTask(SyntheticTask):
    """Prompt `y=x^2+3x+7:`, response `(x=1,y=11)`; every point on the curve earns 1 and is a strategy of its own.

    The leading coefficient lies in [-max_coefficient, max_coefficient] without 0, those of lower powers of x in the
    same range with 0, and the constant in [-max_constant, max_constant]. Responses may name any x of up to 2 digits and
    y of up to 4; demonstrations keep to |x| <= max_x. `answer` holds the coefficients, the leading one first: `1,3,7`.

    Raises:
      ValueError: a difficulty setting is out of range, or more problems are requested than there are.
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
                f"demonstrations would reach y={largest_y}, but responses name y with up to 4 digits; "
                "lower max_x, max_coefficient or max_constant."
            )
        num_polynomials = 2 * self.max_coefficient * (2 * self.max_coefficient + 1) ** (self.degree - 1)
        if num_polynomials * (2 * self.max_constant + 1) > MAX_PROBLEMS:
            raise ValueError(
                f"max_coefficient={self.max_coefficient} and max_constant={self.max_constant} make more than "
                f"{MAX_PROBLEMS:,} problems; lower them."
            )
        super().__post_init__()

    def items(self) -> Sequence[Sequence[int]]:
        return coefficients(self.degree, self.max_coefficient, self.max_constant)

    def problem(self, item: Sequence[int]) -> Problem:
        relation = f"y={polynomial_text(item)}"
        return Problem(id=f"polynomial/{relation}", prompt=f"{relation}:", answer=",".join(map(str, item)))

    def reward(self, problem: Problem, generation: Generation) -> float:
        """1 for a point on the curve, else 0."""
        point = self.strategy(problem, generation)
        return float(point is not None and point[1] == polynomial_value(problem.answer, point[0]))

    def strategy(self, problem: Problem, generation: Generation) -> tuple[int, int] | None:
        """The point (x, y), right or wrong: distinct answers are distinct clusters. None if the text names no point."""
        match = POINT.fullmatch(generation.text)
        return (int(match[1]), int(match[2])) if match else None

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """The point as it is written, which is canonical."""
        return generation.text if POINT.fullmatch(generation.text) else None

    def strategies(self, problem: Problem) -> list[tuple[int, int]]:
        """The demonstrated points by rank: x = 0, 1, -1, 2, -2, ..."""
        return [(x, polynomial_value(problem.answer, x)) for x in map(_x_of_rank, range(2 * self.max_x + 1))]

    def demonstration(self, problem: Problem, rng: np.random.Generator, style: Demonstrations) -> str:
        """A point as a base policy would name it: the larger |x| is, the more often y is off by 1 or 2."""
        x = _x_of_rank(style.rank(2 * self.max_x + 1, rng))
        y = polynomial_value(problem.answer, x)
        if style.errs(0.1 + 0.03 * abs(x) if x else 0.02, rng):
            y += int(rng.choice((-2, -1, 1, 2)))
        return f"(x={x},y={y})"


def coefficients(degree: int, largest: int, largest_constant: int) -> list[tuple[int, ...]]:
    """Those of all polynomials of this degree, the leading one first, within these bounds."""
    powers, constants = range(-largest, largest + 1), range(-largest_constant, largest_constant + 1)
    return [c for c in itertools.product(*[powers] * degree, constants) if c[0]]


def polynomial_text(coefficients: Sequence[int]) -> str:
    """The polynomial as text, with the leading coefficient first: x^2+3x+7."""
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
    """The value at x of the polynomial whose `Problem.answer` is given."""
    y = 0 * x
    for coefficient in coefficients.split(","):
        y = y * x + int(coefficient)
    return y
