"""Polynomials in prose, for pretrained models (paper §"Synthetic Domains with Infinitely Many Valid Strategies")."""

import dataclasses
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated

from poly_epo_jax.config.checks import Range
from poly_epo_jax.tasks.polynomial import coefficients, polynomial_text, polynomial_value
from poly_epo_jax.tasks.synthetic import SyntheticTask
from poly_epo_jax.types import Generation, Problem

PROMPT = "Name real numbers x and y with {relation}. Any pair will do. End with the pair, such as (x=..., y=...)."
NUMBER = r"([-+]?[0-9]{1,12}(?:\.[0-9]{1,12})?(?:/[1-9][0-9]{0,11})?)"
PAIR = re.compile(rf"\bx ?= ?{NUMBER} ?(?:,|;| and) ?y ?= ?{NUMBER}(?![0-9/]|\.[0-9])|\( ?{NUMBER} ?, ?{NUMBER} ?\)")
MAX_CHARACTERS = 4000


@dataclasses.dataclass(kw_only=True, eq=False)
class PolynomialProseTask(SyntheticTask):
    """Takes the last pair of numbers in free text: a point on the curve earns 1, and is a strategy of its own.

    Numbers are whole, decimals or fractions, and are compared exactly: (x=0.5, y=1/4) and (1/2, 0.25) are one point.
    The coefficients of powers of x lie in [-max_coefficient, max_coefficient], the leading one without 0, and the
    constant in [-max_constant, max_constant]. `answer` holds all of them, the leading one first: `1,3,7`.

    Raises:
      ValueError: more problems are requested than there are.
    """

    degree: Annotated[int, Range(1, 3)] = 2
    max_coefficient: Annotated[int, Range(1, 99)] = 9
    max_constant: Annotated[int, Range(0, 99)] = 20
    num_train: Annotated[int, Range(0, 10**6)] = 6_000
    num_held_out: Annotated[int, Range(0, 10**6)] = 200

    def items(self) -> Sequence[Sequence[int]]:
        return coefficients(self.degree, self.max_coefficient, self.max_constant)

    def problem(self, item: Sequence[int]) -> Problem:
        relation = f"y = {polynomial_text(item)}"
        return Problem(
            id=f"polynomial_prose/{relation.replace(' ', '')}",
            prompt=PROMPT.format(relation=relation),
            answer=",".join(map(str, item)),
            chat=True,
        )

    def reward(self, problem: Problem, generation: Generation) -> float:
        """1 for a point on the curve, else 0."""
        point = self.strategy(problem, generation)
        return float(point is not None and point[1] == polynomial_value(problem.answer, point[0]))

    def strategy(self, problem: Problem, generation: Generation) -> tuple[Fraction, Fraction] | None:
        """The last pair (x, y) in the text, right or wrong. None if there is none."""
        pairs = PAIR.findall(generation.text[-MAX_CHARACTERS:].replace("\N{MINUS SIGN}", "-").replace("$", ""))
        if not pairs:
            return None
        x, y = (_number(text) for text in pairs[-1] if text)
        return x, y

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """The pair in lowest terms."""
        point = self.strategy(problem, generation)
        return point and f"({point[0]}, {point[1]})"


def _number(text: str) -> Fraction:
    over, _, under = text.partition("/")
    return Fraction(over) / Fraction(under or 1)
