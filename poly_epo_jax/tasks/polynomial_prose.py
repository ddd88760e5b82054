"""Polynomial solving in free text for pretrained models.

See the paper, §"Synthetic Domains with Infinitely Many Valid Strategies".
"""

import dataclasses
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated

from poly_epo_jax.registry import Range
from poly_epo_jax.tasks.polynomial import coefficients, polynomial_text, polynomial_value
from poly_epo_jax.tasks.synthetic import SyntheticTask
from poly_epo_jax.types import Generation, Problem

PROMPT = "Name real numbers x and y with {relation}. Any pair will do. End with the pair, such as (x=..., y=...)."
NUMBER = r"([-+]?[0-9]{1,12}(?:\.[0-9]{1,12})?(?:/[1-9][0-9]{0,11})?)"
PAIR = re.compile(rf"\bx ?= ?{NUMBER} ?(?:,|;| and) ?y ?= ?{NUMBER}(?![0-9/]|\.[0-9])|\( ?{NUMBER} ?, ?{NUMBER} ?\)")
MAX_CHARACTERS = 4000


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
