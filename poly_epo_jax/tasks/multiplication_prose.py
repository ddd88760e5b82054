"""Multiplication in free text for pretrained models.

See the paper, §"Synthetic Domains with Infinitely Many Valid Strategies".
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated

from poly_epo_jax.registry import Range
from poly_epo_jax.tasks.arithmetic import Expression, equations, product, value
from poly_epo_jax.tasks.decomposition import Decomposition, decomposition
from poly_epo_jax.tasks.multiplication import operand_pairs, operands
from poly_epo_jax.tasks.synthetic import SyntheticTask
from poly_epo_jax.types import Generation, Problem

PROMPT = (
    "Work out {a} * {b}. Take one of the numbers apart, or both: into parts that are added or subtracted, or into "
    "factors. Then multiply the parts. Write every step as an equation, and the result last."
)
LAST_NUMBER = re.compile(r"[0-9][0-9,]*(?![^0-9]*[0-9])")


@dataclasses.dataclass(kw_only=True, eq=False)
class MultiplicationProseTask(SyntheticTask):
    """Multiplication of two numbers with free-text responses.

    A response is correct if it decomposes the operands, all its equations hold, and its last number is the result:

        343 * 67 = (340 + 3)(70 - 3) = 340 * 70 - 340 * 3 + 3 * 70 - 3 * 3 = 22981

    The strategy of a response is its first decomposition. Each product appears in only one order and never as a square.
    `Problem.answer` contains the operands, such as `343,67`.

    Attributes:
      digits: Numbers of digits of the two operands, from 1 to 3, at least one of them greater than 1.
      num_train: Number of training problems.
      num_held_out: Number of held-out problems.

    Raises:
      ValueError: If `digits` is out of range, or more problems are requested than exist.
    """

    digits: tuple[int, int] = (3, 2)
    num_train: Annotated[int, Range(0, 10**6)] = 10_000
    num_held_out: Annotated[int, Range(0, 10**6)] = 200

    def items(self) -> list[tuple[int, int]]:
        """Returns all pairs of operands."""
        return operand_pairs(self.digits)

    def problem(self, item: tuple[int, int]) -> Problem:
        """Returns the problem for a pair of operands."""
        a, b = item
        return Problem(id=f"multiplication_prose/{a}*{b}", prompt=PROMPT.format(a=a, b=b), answer=f"{a},{b}", chat=True)

    def reward(self, problem: Problem, generation: Generation) -> float:
        """Returns 1 for a correct response, otherwise 0."""
        a, b = operands(problem)
        is_correct = self.answer(problem, generation) == str(a * b) and self.strategy(problem, generation) is not None
        return float(is_correct and all(len(set(map(value, sides))) == 1 for sides in equations(generation.text)))

    def strategy(self, problem: Problem, generation: Generation) -> Decomposition | None:
        """Returns the first decomposition in a response, regardless of whether the following steps are correct.

        The decomposition is read from the first formula that decomposes the product. If there is none, it is composed
        of the first equation for each operand, such as 67 = 60 + 7. Returns None (degenerate) if there is neither.
        """
        a, b = operands(problem)
        formulas = equations(generation.text)
        decompositions = (decomposition(side, a, b) for sides in formulas for side in sides)
        of_product = next((found for found in decompositions if found), None)
        return of_product or decomposition(product((_parts_of(a, b, formulas), _parts_of(b, a, formulas))), a, b)

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """Returns the last number in the last 100 characters of the text, or None if there is none."""
        match = LAST_NUMBER.search(generation.text[-100:])
        return match[0].replace(",", "") if match else None


def _parts_of(operand: int, other: int, formulas: Sequence[Sequence[Expression]]) -> Expression:
    """Returns the first expression that decomposes the operand and that an equation equates with it, or the operand.

    A product with a factor 1, such as the step 343 * 1 = 343, does not decompose an operand.
    """
    equated = (side for sides in formulas if operand in sides for side in sides if side != operand)
    return next((side for side in equated if decomposition(product((side, other)), operand, other)), operand)
