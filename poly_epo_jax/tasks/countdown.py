"""Countdown: reach a target with a few numbers, each used once.

The prompts and responses of `countdown` consist of the characters of a small alphabet. A policy writes no intermediate
results, so it has to guess which operators reach the target. About half of the problems are solved by one order of
operators only, and a policy that has lost this order never solves them. `countdown_prose` is a smaller task in text for
pretrained models: `Use 2, 3, 7 to make 17:` is completed with `2*7+3`.
"""

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import numpy as np

from poly_epo_jax.config.checks import one_of
from poly_epo_jax.registry import Range
from poly_epo_jax.tasks.arithmetic import parse_expression, value
from poly_epo_jax.tasks.synthetic import CharacterTask, DemonstrationStyle, SyntheticTask
from poly_epo_jax.types import Generation, Problem

MAX_TOTAL = 99
"""Maximum running total."""

OPERATORS = "+*-/"
"""Operators in the order of their cost in demonstrations: 0, 1, 2, 3."""

NUM_DRAWN = 20_000
"""Number of problems that are drawn from the demonstrated problems if `corpus_skew` is not 0."""

CLUSTERS = {
    "operators": lambda text: text[1::2],
    "sorted_operators": lambda text: "".join(sorted(text[1::2])),
    "expression": lambda text: text,
}
"""Strategies of an expression, by name of the option `clusters`."""

PROSE_LOWEST, PROSE_HIGHEST = 10, 50
"""Smallest and largest target of `CountdownProseTask`."""

EXPRESSION = re.compile(r"\(*\d+(?:\)*[-+*]\(*\d+){2}\)*")
LINE = "Use {}, {}, {} to make {}:"
EXAMPLES = f"{LINE.format(2, 5, 6, 16)} 2*5+6\n{LINE.format(3, 4, 8, 15)} 3+4+8\n"

Item = tuple[tuple[int, ...], int]
ProseItem = tuple[int, int, int, int]


@dataclasses.dataclass(kw_only=True, eq=False)
class CountdownTask(CharacterTask):
    """Countdown with prompts such as `2,3,5,7=16` and responses such as `5*7-3/2`.

    Expressions are read from left to right, without precedence: `5*7-3/2` is ((5*7)-3)/2 = 16. Each number is used
    once, and each running total is a whole number between 1 and `MAX_TOTAL`. The strategy of a response is its
    operators in order. By default, the base policy is fitted to problems that are neither trained on nor held out.
    `Problem.answer` contains the prompt.

    Attributes:
      size: Number of numbers, each from 1 to 9.
      lowest: Smallest target.
      highest: Largest target.
      clusters: Definition of a strategy: "operators" in the order of the response, "sorted_operators" regardless of
        their order, or the "expression".
      corpus_skew: Preference of the demonstrations for problems with a cheap solution. A problem whose cheapest
        operators cost c is drawn with weight exp(-corpus_skew c). 0 draws all demonstrated problems equally often.
      num_train: Number of training problems.
      num_held_out: Number of held-out problems.
      num_demonstrated: Number of problems that are only demonstrated to the base policy.

    Raises:
      ValueError: If `lowest` is greater than `highest`, or more problems are requested than exist.
    """

    size: Annotated[int, Range(2, 5)] = 4
    lowest: Annotated[int, Range(1, MAX_TOTAL)] = 10
    highest: Annotated[int, Range(1, MAX_TOTAL)] = 99
    clusters: Annotated[str, one_of(*CLUSTERS)] = "operators"
    corpus_skew: Annotated[float, Range(0, 10)] = 1.0
    num_train: Annotated[int, Range(0, 10**6)] = 3000
    num_held_out: Annotated[int, Range(0, 10**6)] = 200
    num_demonstrated: Annotated[int, Range(0, 10**6)] = 13_855

    alphabet: ClassVar[str] = "0123456789+-*/=,"

    def __post_init__(self):
        if self.lowest > self.highest:
            raise ValueError(f"lowest={self.lowest} is greater than highest={self.highest}; lower it.")
        super().__post_init__()
        if self.corpus_skew:
            costs = np.array([min(map(operator_cost, self.solutions(p))) for p in self.demonstrated_problems])
            weights, rng = np.exp(-self.corpus_skew * costs), np.random.default_rng(self.seed)
            self.demonstrated_problems = tuple(
                self.demonstrated_problems[i] for i in rng.choice(len(weights), NUM_DRAWN, p=weights / weights.sum())
            )

    def items(self) -> Sequence[Item]:
        """Returns all solvable problems: sorted numbers and a target."""
        return [
            (numbers, target)
            for numbers in itertools.combinations_with_replacement(range(1, 10), self.size)
            for target in sorted(reachable(numbers))
            if self.lowest <= target <= self.highest
        ]

    def problem(self, item: Item) -> Problem:
        """Returns the problem for sorted numbers and a target."""
        numbers, target = item
        text = f"{','.join(map(str, numbers))}={target}"
        return Problem(id=f"countdown/{text}", prompt=text, answer=text)

    def reward(self, problem: Problem, generation: Generation) -> float:
        """Returns 1 if the expression uses the numbers and reaches the target, otherwise 0."""
        numbers, target = _parse(problem)
        text = generation.text
        if not self._is_expression(text) or tuple(sorted(map(int, text[::2]))) != numbers:
            return 0.0
        return float(evaluate(text) == target)

    def strategy(self, problem: Problem, generation: Generation) -> str | None:
        """Returns the strategy, whether correct or not, or None if the response is not an expression of this size."""
        text = generation.text
        return CLUSTERS[self.clusters](text) if self._is_expression(text) else None

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """Returns the expression, or None if the response is not an expression of this size."""
        return generation.text if self._is_expression(generation.text) else None

    def demonstration(self, problem: Problem, rng: np.random.Generator, style: DemonstrationStyle) -> str:
        """Draws a demonstration for fitting a base policy.

        The operators are drawn with weight exp(-style.skew cost), see `operator_cost`, and then one of their
        expressions. With probability 0.3 `style.error_rate`, one operator is drawn again, from all four.

        Args:
          problem: Problem to demonstrate.
          rng: Random generator.
          style: Error rate and distribution of strategies.

        Returns:
          The text of the response.
        """
        solutions = self.solutions(problem)
        operators = solutions[style.choose(np.array([*map(operator_cost, solutions)]), rng)]
        texts = expressions(*_parse(problem), operators)
        text = texts[int(rng.integers(len(texts)))]
        if style.draw_mistake(0.3, rng):
            place = 1 + 2 * int(rng.integers(self.size - 1))
            text = text[:place] + str(rng.choice(list(OPERATORS))) + text[place + 1 :]
        return text

    def solutions(self, problem: Problem) -> list[str]:
        """Returns the operators of all solutions, in order and without steps by 1, sorted as text."""
        numbers, target = _parse(problem)
        return sorted(reachable(numbers)[target])

    def _is_expression(self, text: str) -> bool:
        return (
            len(text) == 2 * self.size - 1
            and all(character in "123456789" for character in text[::2])
            and all(character in OPERATORS for character in text[1::2])
        )


def operator_cost(operators: str) -> int:
    """Returns the cost of operators, such as 0 for `+++` and 9 for `///`."""
    return sum(map(OPERATORS.index, operators))


def evaluate(expression: str) -> int | None:
    """Evaluates an expression of one-digit numbers from left to right.

    Returns:
      The total, or None if a running total is not a whole number between 1 and `MAX_TOTAL`.
    """
    total: int | None = int(expression[0])
    for operator, number in zip(expression[1::2], expression[2::2], strict=True):
        total = _apply(total, operator, int(number))
        if total is None:
            return None
    return total


def _apply(total: int, operator: str, number: int) -> int | None:
    if operator == "/":
        after = total // number if total % number == 0 else 0
    else:
        after = {"+": total + number, "-": total - number, "*": total * number}[operator]
    return after if 1 <= after <= MAX_TOTAL else None


@functools.cache
def reachable(numbers: tuple[int, ...]) -> Mapping[int, frozenset[str]]:
    """Maps each total that the sorted numbers can reach to the operators, in order, of its expressions.

    Multiplications and divisions by 1, which change nothing, are not used.
    """
    if len(numbers) == 1:
        return {numbers[0]: frozenset([""])}
    found = collections.defaultdict(set)
    for number in set(numbers):
        last = numbers.index(number)
        for total, all_operators in reachable(numbers[:last] + numbers[last + 1 :]).items():
            for operator in OPERATORS if number > 1 else "+-":
                after = _apply(total, operator, number)
                if after is not None:
                    found[after].update(operators + operator for operators in all_operators)
    return {total: frozenset(all_operators) for total, all_operators in found.items()}


@functools.cache
def expressions(numbers: tuple[int, ...], target: int, operators: str) -> Sequence[str]:
    """Returns all expressions of the numbers with these operators that reach the target, without steps by 1.

    Args:
      numbers: Numbers from 1 to 9, in ascending order.
      target: Total of the expression, which is evaluated from left to right.
      operators: Operators between the numbers, in order, such as `*-/`.
    """
    texts = []
    for order in sorted(set(itertools.permutations(numbers))):
        text = str(order[0]) + "".join(f"{op}{number}" for op, number in zip(operators, order[1:], strict=True))
        if "*1" not in text and "/1" not in text and evaluate(text) == target:
            texts.append(text)
    return texts


def _parse(problem: Problem) -> Item:
    numbers, target = problem.answer.split("=")
    return tuple(map(int, numbers.split(","))), int(target)


@dataclasses.dataclass(kw_only=True, eq=False)
class CountdownProseTask(SyntheticTask):
    """Countdown with three numbers, two examples in the prompt, and the usual precedence of operators.

    A correct response is an expression with +, - and * that uses each number once and reaches the target. Spaces and
    parentheses are allowed. All problems have a solution without parentheses. The strategy of a response is its
    operators in order. `Problem.answer` contains the numbers and the target, such as `2,3,7,17`.

    Attributes:
      num_train: Number of training problems.
      num_held_out: Number of held-out problems.

    Raises:
      ValueError: If more problems are requested than exist.
    """

    num_train: Annotated[int, Range(0, 10**6)] = 600
    num_held_out: Annotated[int, Range(0, 10**6)] = 40

    def items(self) -> Sequence[ProseItem]:
        """Returns all solvable problems except for the examples: sorted numbers and a target."""
        found = set()
        for a, b, c in itertools.product(range(1, 10), repeat=3):
            for first, second in itertools.product("+-*", repeat=2):
                found.add((*sorted((a, b, c)), _value(f"{a}{first}{b}{second}{c}")))
        return sorted(
            item for item in found if PROSE_LOWEST <= item[-1] <= PROSE_HIGHEST and LINE.format(*item) not in EXAMPLES
        )

    def problem(self, item: ProseItem) -> Problem:
        """Returns the problem for sorted numbers and a target."""
        text = ",".join(map(str, item))
        return Problem(id=f"countdown_prose/{text}", prompt=EXAMPLES + LINE.format(*item), answer=text)

    def reward(self, problem: Problem, generation: Generation) -> float:
        """Returns 1 if the expression uses the numbers and reaches the target, otherwise 0."""
        text = self.answer(problem, generation)
        *numbers, target = problem.answer.split(",")
        return float(text is not None and sorted(re.findall(r"\d+", text)) == numbers and _value(text) == int(target))

    def strategy(self, problem: Problem, generation: Generation) -> str | None:
        """Returns the operators, whether correct or not, or None if the response is not such an expression."""
        text = self.answer(problem, generation)
        return text and re.sub(r"[^-+*]", "", text)

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        """Returns the expression without spaces, or None if the response is not an expression of three numbers."""
        text = generation.text.strip()
        compact = text.replace(" ", "")
        return compact if EXPRESSION.fullmatch(compact) and _value(text) is not None else None


def _value(text: str) -> int | None:
    expression = parse_expression(text)
    return None if expression is None else value(expression)
