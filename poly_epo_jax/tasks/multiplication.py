"""Multiplication by decomposing one operand (paper §"Synthetic Domains with Infinitely Many Valid Strategies").

The prompts and responses of `multiplication` consist of the characters of a small alphabet. `multiplication_prose` is
the same task in free text for pretrained models.
"""

import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from poly_epo_jax.registry import Range
from poly_epo_jax.tasks.arithmetic import Decomposition, Expression, decomposition, equations, product, value
from poly_epo_jax.tasks.synthetic import CharacterTask, DemonstrationStyle, SyntheticTask
from poly_epo_jax.types import Generation, Problem

COMBINE = {"+": operator.add, "-": operator.sub, "*": operator.mul}
# Canonical positive integers, so a part of 0 does not parse. The demonstrated steps of 3-digit operands fit in 7
# digits.
NUMBER = "([1-9][0-9]{0,6})"
RESPONSE = re.compile(rf"{NUMBER}\*\({NUMBER}([-+*]){NUMBER}\)={NUMBER}\3{NUMBER}={NUMBER}")

PROMPT = (
    "Work out {a} * {b}. Take one of the numbers apart, or both: into parts that are added or subtracted, or into "
    "factors. Then multiply the parts. Write every step as an equation, and the result last."
)
LAST_NUMBER = re.compile(r"[0-9][0-9,]*(?![^0-9]*[0-9])")


class DecompositionStrategy(NamedTuple):
    """A strategy that writes `operand` as `parts[0] symbol parts[1]`.

    Attributes:
      operand: Operand that is decomposed.
      symbol: Operator between the parts: "+", "-" or "*".
      parts: The two parts, in descending order if `symbol` is commutative.
    """

    operand: int
    symbol: str
    parts: tuple[int, int]


@dataclasses.dataclass(kw_only=True, eq=False)
class MultiplicationTask(CharacterTask):
    """Multiplication of two numbers, with prompts such as `7*24:`.

    A correct response contains a strategy, its two intermediate terms and the result:

        7*(20+4)=140+28=168   place values       24*(5+2)=120+48=168   split of the other operand
        7*(25-1)=175-7=168    compensation       7*(6*4)=42*4=168      factorization

    The decomposed operand is in parentheses, and the other operand precedes it. Operands are at least 2, because 1
    cannot be decomposed. Each product appears in only one order and never as a square. No held-out product is therefore
    trained on in the reverse order, and each operand is identified by its value. `Problem.answer` contains the
    operands, such as `7,24`.

    Attributes:
      digits: Numbers of digits of the two operands, from 1 to 3, at least one of them greater than 1.
      num_train: Number of training problems.
      num_held_out: Number of held-out problems.
      alphabet: Characters of all prompts and demonstrations.

    Raises:
      ValueError: If `digits` is out of range, or more problems are requested than exist.
    """

    digits: tuple[int, int] = (1, 2)
    num_train: Annotated[int, Range(0, 10**6)] = 600
    num_held_out: Annotated[int, Range(0, 10**6)] = 120

    alphabet: ClassVar[str] = "0123456789*+-=():"

    def items(self) -> list[tuple[int, int]]:
        """Returns all pairs of operands."""
        return operand_pairs(self.digits)

    def problem(self, item: tuple[int, int]) -> Problem:
        """Returns the problem for a pair of operands."""
        a, b = item
        return Problem(id=f"multiplication/{a}*{b}", prompt=f"{a}*{b}:", answer=f"{a},{b}")

    def reward(self, problem: Problem, generation: Generation) -> float:
        """Returns 1 if the strategy yields the operand and all following terms are correct, otherwise 0."""
        strategy = self.strategy(problem, generation)
        if strategy is None:
            return 0.0
        front, first, second, *steps = map(int, re.findall("[0-9]+", generation.text))
        yields_operand = COMBINE[strategy.symbol](first, second) == strategy.operand
        return float(yields_operand and steps == _steps(front, strategy.symbol, first, second))

    def strategy(self, problem: Problem, generation: Generation) -> DecompositionStrategy | None:
        """Returns the decomposition of a response, regardless of whether it and its arithmetic are correct.

        Returns None (degenerate) if the text does not parse, keeps neither operand in front of the parentheses, or has
        a factor 1.
        """
        match = RESPONSE.fullmatch(generation.text)
        if match is None or int(match[1]) not in operands(problem):
            return None
        symbol, first, second = match[3], int(match[2]), int(match[4])
        if symbol == "*" and 1 in (first, second):
            return None
        parts = (first, second) if symbol == "-" else (max(first, second), min(first, second))
        return DecompositionStrategy(_other_operand(problem, int(match[1])), symbol, parts)

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """Returns the result at the end of the response, or None if the response does not parse."""
        match = RESPONSE.fullmatch(generation.text)
        return match[7] if match else None

    def strategies(self, problem: Problem) -> list[DecompositionStrategy]:
        """Returns the demonstrated strategies (at least 12), ordered by rank.

        Strategies are ranked by kind. Within a kind, the strategies of the larger operand come first.
        """
        kinds = zip(*map(_strategies_by_kind, sorted(operands(problem), reverse=True)), strict=True)
        return list(dict.fromkeys(strategy for kind in kinds for strategies in kind for strategy in strategies))

    def demonstration(self, problem: Problem, rng: np.random.Generator, style: DemonstrationStyle) -> str:
        """Draws a demonstration for fitting a base policy.

        With probability `style.error_rate * (0.15 + 0.01 * rank)`, one of the three numbers after the parentheses is
        off by -1, 1 or 10. `rank` is the index of the demonstrated strategy in `strategies(problem)`. If a term is off,
        the result is computed from the incorrect term.

        Args:
          problem: Problem to demonstrate.
          rng: Random generator.
          style: Error rate and distribution of strategies.

        Returns:
          The text of the response.
        """
        strategies = self.strategies(problem)
        rank = style.choose(np.arange(len(strategies)), rng)
        operand, symbol, (first, second) = strategies[rank]
        front = _other_operand(problem, operand)
        mistakes = [0, 0, 0]
        if style.draw_mistake(0.15 + 0.01 * rank, rng):
            mistakes[rng.integers(3)] = int(rng.choice((-1, 1, 10)))  # All numbers remain positive.
        left, right, _ = _steps(front, symbol, first, second)
        left, right = left + mistakes[0], right + mistakes[1]
        result = COMBINE[symbol](left, right) + mistakes[2]
        return f"{front}*({first}{symbol}{second})={left}{symbol}{right}={result}"


def operand_pairs(digits: tuple[int, int]) -> list[tuple[int, int]]:
    """Returns all pairs of different numbers of at least 2 with the given numbers of digits, each in one order only.

    Raises:
      ValueError: If `digits` is out of range.
    """
    if not all(1 <= d <= 3 for d in digits) or max(digits) == 1:
        raise ValueError(
            f"digits={digits} is out of range; use 1 to 3 digits per operand, and at least 2 for one of them."
        )
    left, right = (range(max(2, 10 ** (d - 1)), 10**d) for d in digits)
    return list(itertools.combinations(left, 2) if left == right else itertools.product(left, right))


def _steps(front: int, symbol: str, first: int, second: int) -> list[int]:
    """Evaluates front * (first symbol second), and returns the two intermediate terms and the result."""
    left, right = front * first, second if symbol == "*" else front * second
    return [left, right, COMBINE[symbol](left, right)]


@functools.cache
def _strategies_by_kind(operand: int) -> tuple[list[DecompositionStrategy], ...]:
    """Returns the splits by place value, compensations to a round number, offsets by 1 to 4, and factorizations."""
    units = [10**k for k in range(1, max(2, len(str(operand))))]
    kinds = (
        [("+", operand - operand % unit, operand % unit) for unit in units],
        [("-", operand + -operand % unit, -operand % unit) for unit in units],
        [(symbol, whole, k) for k in range(1, 5) for symbol, whole in (("+", operand - k), ("-", operand + k))],
        [("*", operand // k, k) for k in range(2, math.isqrt(operand) + 1) if operand % k == 0],
    )
    # The condition drops trivial parts and splits that repeat an earlier one in reverse order.
    return tuple(
        [DecompositionStrategy(operand, symbol, (p, q)) for symbol, p, q in kind if p >= q > 0] for kind in kinds
    )


def operands(problem: Problem) -> list[int]:
    """Returns the two operands of a problem."""
    return [int(operand) for operand in problem.answer.split(",")]


def _other_operand(problem: Problem, operand: int) -> int:
    both = operands(problem)
    return both[1 - both.index(operand)]


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
