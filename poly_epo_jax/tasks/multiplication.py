"""Multiplication by decomposing one operand (paper §"Synthetic Domains with Infinitely Many Valid Strategies")."""

import dataclasses
import functools
import itertools
import math
import operator
import re
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from poly_epo_jax.config.checks import Range
from poly_epo_jax.tasks.demonstrations import Demonstrations
from poly_epo_jax.tasks.synthetic import SyntheticTask
from poly_epo_jax.types import Generation, Problem

COMBINE = {"+": operator.add, "-": operator.sub, "*": operator.mul}
# Canonical positive integers, so a part of 0 does not parse; 7 digits hold every demonstrated step of 3-digit operands.
NUMBER = "([1-9][0-9]{0,6})"
RESPONSE = re.compile(rf"{NUMBER}\*\({NUMBER}([-+*]){NUMBER}\)={NUMBER}\3{NUMBER}={NUMBER}")


class Plan(NamedTuple):
    """A strategy: write `operand` as parts[0] `symbol` parts[1]; the parts of `+` and `*` are sorted largest first."""

    operand: int
    symbol: str
    parts: tuple[int, int]


@dataclasses.dataclass(kw_only=True, eq=False)
class MultiplicationTask(SyntheticTask):
    """Prompt `7*24:`; a response shows a plan, its two intermediate terms and the result, all of which must be right.

        7*(20+4)=140+28=168   place values       24*(5+2)=120+48=168   another split, of the other operand
        7*(25-1)=175-7=168    compensation       7*(6*4)=42*4=168      factorisation

    The split operand is in the parentheses, the other in front. Operands have `digits` digits and are at least 2 (1 has
    no parts). A product appears in only one order and never as a square, so that no held-out product is trained on in
    another guise and an operand is identified by its value. `answer` holds the operands: `7,24`.

    Raises:
      ValueError: `digits` is out of range, or more problems are requested than there are.
    """

    digits: tuple[int, int] = (1, 2)
    num_train: Annotated[int, Range(0, 10**6)] = 600
    num_held_out: Annotated[int, Range(0, 10**6)] = 120

    alphabet: ClassVar[str] = "0123456789*+-=():"

    def items(self) -> list[tuple[int, int]]:
        return operand_pairs(self.digits)

    def problem(self, item: tuple[int, int]) -> Problem:
        a, b = item
        return Problem(id=f"multiplication/{a}*{b}", prompt=f"{a}*{b}:", answer=f"{a},{b}")

    def reward(self, problem: Problem, generation: Generation) -> float:
        """1 if the plan makes the operand and everything that follows is right, else 0, also for degenerate text."""
        plan = self.strategy(problem, generation)
        if plan is None:
            return 0.0
        front, first, second, *steps = map(int, re.findall("[0-9]+", generation.text))
        makes_operand = COMBINE[plan.symbol](first, second) == plan.operand
        return float(makes_operand and steps == _steps(front, plan.symbol, first, second))

    def strategy(self, problem: Problem, generation: Generation) -> Plan | None:
        """Which operand is split, and into what, whether or not the plan and its arithmetic are right.

        None (degenerate) for text that does not parse, leaves neither operand whole, or has a factor 1.
        """
        match = RESPONSE.fullmatch(generation.text)
        if match is None or int(match[1]) not in operands(problem):
            return None
        symbol, first, second = match[3], int(match[2]), int(match[4])
        if symbol == "*" and 1 in (first, second):
            return None
        parts = (first, second) if symbol == "-" else (max(first, second), min(first, second))
        return Plan(_other_operand(problem, int(match[1])), symbol, parts)

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """The result at the end of a response that parses."""
        match = RESPONSE.fullmatch(generation.text)
        return match[7] if match else None

    def strategies(self, problem: Problem) -> list[Plan]:
        """The demonstrated plans, at least 12, by rank: kind by kind, and in each kind the larger operand's first."""
        kinds = zip(*map(_plans_by_kind, sorted(operands(problem), reverse=True)), strict=True)
        return list(dict.fromkeys(plan for kind in kinds for plans in kind for plan in plans))

    def demonstration(self, problem: Problem, rng: np.random.Generator, style: Demonstrations) -> str:
        """A worked plan as a base policy would write it: the higher its rank, the more often one step has a slip."""
        plans = self.strategies(problem)
        rank = style.rank(len(plans), rng)
        operand, symbol, (first, second) = plans[rank]
        front = _other_operand(problem, operand)
        slips = [0, 0, 0]
        if style.errs(0.15 + 0.01 * rank, rng):
            slips[rng.integers(3)] = int(rng.choice((-1, 1, 10)))  # no slip takes a number below 1
        left, right, _ = _steps(front, symbol, first, second)
        left, right = left + slips[0], right + slips[1]
        result = COMBINE[symbol](left, right) + slips[2]
        return f"{front}*({first}{symbol}{second})={left}{symbol}{right}={result}"


def operand_pairs(digits: tuple[int, int]) -> list[tuple[int, int]]:
    """All pairs of numbers with so many digits, in one order only and without squares.

    Raises:
      ValueError: `digits` is out of range.
    """
    if not all(1 <= d <= 3 for d in digits) or max(digits) == 1:
        raise ValueError(f"digits is {digits}; choose 1 to 3 for each operand, at least 2 for one of them.")
    left, right = (range(max(2, 10 ** (d - 1)), 10**d) for d in digits)
    return list(itertools.combinations(left, 2) if left == right else itertools.product(left, right))


def _steps(front: int, symbol: str, first: int, second: int) -> list[int]:
    """front * (first symbol second) worked out: the two intermediate terms and the result."""
    left, right = front * first, second if symbol == "*" else front * second
    return [left, right, COMBINE[symbol](left, right)]


@functools.cache
def _plans_by_kind(operand: int) -> tuple[list[Plan], ...]:
    """Place values, near-round compensation, splits and compensations in small steps, factorisations."""
    units = [10**k for k in range(1, max(2, len(str(operand))))]
    kinds = (
        [("+", operand - operand % unit, operand % unit) for unit in units],
        [("-", operand + -operand % unit, -operand % unit) for unit in units],
        [(symbol, whole, k) for k in range(1, 5) for symbol, whole in (("+", operand - k), ("-", operand + k))],
        [("*", operand // k, k) for k in range(2, math.isqrt(operand) + 1) if operand % k == 0],
    )
    # The filter drops trivial parts, and splits that repeat an earlier one in the other order.
    return tuple([Plan(operand, symbol, (p, q)) for symbol, p, q in kind if p >= q > 0] for kind in kinds)


def operands(problem: Problem) -> list[int]:
    return [int(operand) for operand in problem.answer.split(",")]


def _other_operand(problem: Problem, operand: int) -> int:
    both = operands(problem)
    return both[1 - both.index(operand)]
