"""Tests of the countdown task: problems, grading, strategies, demonstrations and problem splits."""

import collections
import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from responses import response

from poly_epo_jax.tasks import TASKS, CountdownTask, DemonstrationStyle
from poly_epo_jax.tasks.countdown import MAX_TOTAL, NUM_DRAWN, OPERATORS, operator_cost

CLEAN = DemonstrationStyle()


def small_task(**options: Any) -> CountdownTask:
    """Returns a task of three numbers, whose 1,360 problems are generated quickly."""
    small: dict[str, Any] = {"size": 3, "num_train": 200, "num_held_out": 50, "num_demonstrated": 500}
    return CountdownTask(**small | options)


def totals(expression: str) -> list[Fraction]:
    """Returns all running totals of an expression. Reference implementation, independent of the task."""
    steps = [Fraction(expression[0])]
    for symbol, number in zip(expression[1::2], expression[2::2], strict=True):
        steps.append(eval(f"total {symbol} number", {"total": steps[-1], "number": Fraction(number)}))
    return steps


def is_solution(expression: str, target: int) -> bool:
    steps = totals(expression)
    return steps[-1] == target and all(step.denominator == 1 and 1 <= step <= MAX_TOTAL for step in steps)


def all_expressions(numbers: tuple[int, ...]) -> set[str]:
    return {
        str(order[0]) + "".join(symbol + str(number) for symbol, number in zip(symbols, order[1:], strict=True))
        for order in itertools.permutations(numbers)
        for symbols in itertools.product(OPERATORS, repeat=len(numbers) - 1)
    }


def test_default_problems():
    task = TASKS["countdown"]()
    assert isinstance(task, CountdownTask)
    assert len(task.items()) == 17_055 == len(task.train_problems) + len(task.held_out_problems) + 13_855
    ways = [len(task.solutions(problem)) for problem in task.train_problems]
    assert 1.9 < np.mean(ways) < 2.1 and np.median(ways) == 1
    assert max(len(problem.prompt) for problem in task.train_problems) == len("2,3,5,7=16") == 10
    assert all(set(problem.prompt) <= set(task.alphabet) for problem in task.train_problems)


def test_problems_are_exactly_the_solvable_ones():
    task = small_task(lowest=5, highest=12, num_train=20, num_held_out=5, num_demonstrated=50)
    expected = collections.defaultdict(set)
    for numbers in itertools.combinations_with_replacement(range(1, 10), 3):
        for expression in all_expressions(numbers):
            for target in range(5, 13):
                if is_solution(expression, target):
                    expected[numbers, target].add(expression[1::2])
    assert set(task.items()) == expected.keys()
    # Solutions that multiply or divide by 1 are correct, but they are not demonstrated.
    for item in task.items():
        assert set(task.solutions(task.problem(item))) <= expected[item]


def test_problem_sets_are_disjoint_and_do_not_depend_on_the_number_of_training_problems():
    task, fewer = small_task(corpus_skew=0.0), small_task(corpus_skew=0.0, num_train=20)
    parts = (task.train_problems, task.held_out_problems, task.demonstrated_problems)
    assert [len(part) for part in parts] == [200, 50, 500]
    assert len({problem.id for part in parts for problem in part}) == 750
    assert fewer.train_problems == task.train_problems[:20]
    assert fewer.held_out_problems == task.held_out_problems
    assert fewer.demonstrated_problems == task.demonstrated_problems
    assert small_task(seed=1).held_out_problems != task.held_out_problems


@pytest.mark.parametrize("clusters", ["operators", "sorted_operators", "expression"])
def test_all_expressions_of_a_problem(clusters: str):
    task = small_task(clusters=clusters)
    for problem in task.held_out_problems[:10]:
        numbers, target = problem.answer.split("=")
        numbers = tuple(map(int, numbers.split(",")))
        for expression in all_expressions(numbers):
            assert task.reward(problem, response(expression)) == is_solution(expression, int(target)), expression
            strategies = {"operators": expression[1::2], "sorted_operators": "".join(sorted(expression[1::2]))}
            assert task.strategy(problem, response(expression)) == strategies.get(clusters, expression)
            assert task.answer(problem, response(expression)) == expression


@pytest.mark.parametrize(
    "text", ["", "1", "1+2", "1+2+", "+1+2+", "1+2+3+4", "0+2+3", "1+2=3", "1 +2", "1++23", "a+b+c"]
)
def test_other_texts_are_degenerate(text: str):
    task = small_task()
    problem = task.train_problems[0]
    assert task.reward(problem, response(text)) == 0
    assert task.strategy(problem, response(text)) is None and task.answer(problem, response(text)) is None


def test_other_numbers_earn_nothing():
    task = small_task()
    problem = task.problem(((1, 2, 3), 6))
    assert task.reward(problem, response("1+2+3")) == 1
    assert task.reward(problem, response("2+2+2")) == 0  # reaches the target with other numbers
    assert task.reward(problem, response("1+2-3")) == 0


def test_demonstrations_are_solutions():
    task, rng = small_task(), np.random.default_rng(0)
    for problem in task.demonstrated_problems[:300]:
        assert task.reward(problem, response(task.demonstration(problem, rng, CLEAN))) == 1


def test_skewed_demonstrations_prefer_cheap_operators():
    """Compares the frequency of the operators of one problem with exp(-skew cost)."""
    task, rng, skew = CountdownTask(), np.random.default_rng(0), 0.5
    problem = task.problem(((2, 3, 5, 7), 16))
    costs = {operators: operator_cost(operators) for operators in task.solutions(problem)}
    assert costs == {"-*+": 3, "*+-": 3, "*-/": 6, "*-+": 3, "*-*": 4}
    style = DemonstrationStyle(skew=skew)
    drawn = collections.Counter(task.demonstration(problem, rng, style)[1::2] for _ in range(4000))
    total = sum(np.exp(-skew * cost) for cost in costs.values())
    for operators, cost in costs.items():
        assert drawn[operators] / 4000 == pytest.approx(np.exp(-skew * cost) / total, abs=0.03)


def test_rate_of_mistakes():
    task, rng = CountdownTask(), np.random.default_rng(0)
    style = DemonstrationStyle(error_rate=1.0)
    problems = [task.demonstrated_problems[i] for i in range(2000)]
    rewards = [task.reward(problem, response(task.demonstration(problem, rng, style))) for problem in problems]
    # Three of four drawn operators differ from the demonstrated one, and few of those still reach the target.
    assert 1 - np.mean(rewards) == pytest.approx(0.3 * 0.75, abs=0.03)


def test_the_corpus_prefers_problems_with_a_cheap_solution():
    even, skewed = small_task(corpus_skew=0.0), small_task(corpus_skew=1.0)

    def mean_cost(task: CountdownTask) -> float:
        cheapest = [min(map(operator_cost, task.solutions(problem))) for problem in task.demonstrated_problems]
        return float(np.mean(cheapest))

    assert len(skewed.demonstrated_problems) == NUM_DRAWN
    assert set(skewed.demonstrated_problems) <= set(even.demonstrated_problems)
    costs = np.array([min(map(operator_cost, even.solutions(problem))) for problem in even.demonstrated_problems])
    expected = np.average(costs, weights=np.exp(-costs))
    assert mean_cost(skewed) == pytest.approx(expected, abs=0.05) and mean_cost(skewed) < mean_cost(even) - 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_train=2000), "num_train=2000 and num_held_out=50 and num_demonstrated=500.*at most 1360"),
        (dict(lowest=50, highest=40), "lowest=50.*highest=40"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        small_task(**options)
