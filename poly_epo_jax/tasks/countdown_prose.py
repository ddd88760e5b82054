"""Countdown in text for pretrained models: `Use 2, 3, 7 to make 17:` is completed with `2*7+3`."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Annotated

from poly_epo_jax.registry import Range
from poly_epo_jax.tasks.arithmetic import parse_expression, value
from poly_epo_jax.tasks.synthetic import SyntheticTask
from poly_epo_jax.types import Generation, Problem

LOWEST, HIGHEST = 10, 50
"""Smallest and largest target."""

EXPRESSION = re.compile(r"\(*\d+(?:\)*[-+*]\(*\d+){2}\)*")
LINE = "Use {}, {}, {} to make {}:"
EXAMPLES = f"{LINE.format(2, 5, 6, 16)} 2*5+6\n{LINE.format(3, 4, 8, 15)} 3+4+8\n"

Item = tuple[int, int, int, int]


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

    def items(self) -> Sequence[Item]:
        """Returns all solvable problems except for the examples: sorted numbers and a target."""
        found = set()
        for a, b, c in itertools.product(range(1, 10), repeat=3):
            for first, second in itertools.product("+-*", repeat=2):
                found.add((*sorted((a, b, c)), _value(f"{a}{first}{b}{second}{c}")))
        return sorted(item for item in found if LOWEST <= item[-1] <= HIGHEST and LINE.format(*item) not in EXAMPLES)

    def problem(self, item: Item) -> Problem:
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
