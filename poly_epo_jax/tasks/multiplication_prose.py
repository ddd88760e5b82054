"""Multiplication in prose, for pretrained models (paper §"Synthetic Domains with Infinitely Many Valid Strategies")."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated

from poly_epo_jax.config.checks import Range
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
    """A text earns 1 if it takes the operands apart, all its equations hold, and its last number is the result.

        343 * 67 = (340 + 3)(70 - 3) = 340 * 70 - 340 * 3 + 3 * 70 - 3 * 3 = 22981

    The strategy is how the text first takes the operands apart. A product appears in only one order and never as a
    square. `answer` holds the operands: `343,67`.

    Raises:
      ValueError: `digits` is out of range, or more problems are requested than there are.
    """

    digits: tuple[int, int] = (3, 2)
    num_train: Annotated[int, Range(0, 10**6)] = 10_000
    num_held_out: Annotated[int, Range(0, 10**6)] = 200

    def items(self) -> list[tuple[int, int]]:
        return operand_pairs(self.digits)

    def problem(self, item: tuple[int, int]) -> Problem:
        a, b = item
        return Problem(id=f"multiplication_prose/{a}*{b}", prompt=PROMPT.format(a=a, b=b), answer=f"{a},{b}", chat=True)

    def reward(self, problem: Problem, generation: Generation) -> float:
        """1 or 0, as described above."""
        a, b = operands(problem)
        is_right = self.answer(problem, generation) == str(a * b) and self.strategy(problem, generation) is not None
        return float(is_right and all(len(set(map(value, sides))) == 1 for sides in equations(generation.text)))

    def strategy(self, problem: Problem, generation: Generation) -> Decomposition | None:
        """How the operands are taken apart, whether or not what follows is right.

        This is read from the first formula for their product or, if there is none, from what the text first says about
        each operand, such as 67 = 60 + 7. None (degenerate) if it says neither.
        """
        a, b = operands(problem)
        formulas = equations(generation.text)
        apart = (decomposition(side, a, b) for sides in formulas for side in sides)
        whole = next((found for found in apart if found), None)
        return whole or decomposition(product((_parts_of(a, formulas), _parts_of(b, formulas))), a, b)

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """The last number of the text."""
        match = LAST_NUMBER.search(generation.text[-100:])
        return match[0].replace(",", "") if match else None


def _parts_of(operand: int, formulas: Sequence[Sequence[Expression]]) -> Expression:
    """The first expression that an equation says the operand is equal to; the operand itself if there is none."""
    said = (side for sides in formulas if operand in sides for side in sides if side != operand)
    return next((side for side in said if value(side) == operand), operand)
