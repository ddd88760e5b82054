"""Tests of Countdown in text: problems, grading in usual precedence, and strategies."""

import functools
import itertools

import pytest
from responses import response

from poly_epo_jax.tasks import TASKS, CountdownProseTask
from poly_epo_jax.types import Problem


@functools.cache
def task() -> CountdownProseTask:
    return CountdownProseTask(num_train=5, num_held_out=5)


@functools.cache
def example() -> Problem:
    return task().problem((2, 3, 7, 17))


def test_problems_are_exactly_the_solvable_ones_without_the_examples():
    expected = set()
    for numbers in itertools.combinations_with_replacement(range(1, 10), 3):
        for (a, b, c), (f, g) in itertools.product(itertools.permutations(numbers), itertools.product("+-*", repeat=2)):
            target = eval(f"{a}{f}{b}{g}{c}")
            if 10 <= target <= 50:
                expected.add((*numbers, target))
    assert set(task().items()) == expected - {(2, 5, 6, 16), (3, 4, 8, 15)}
    default = TASKS["countdown_prose"]()
    problems = [*default.train_problems, *default.held_out_problems]
    assert len({problem.prompt for problem in problems}) == 640


def test_the_prompt_contains_two_correct_examples():
    *examples, last = example().prompt.split("\n")
    assert last == "Use 2, 3, 7 to make 17:"
    for text, item in zip(examples, [(2, 5, 6, 16), (3, 4, 8, 15)], strict=True):
        line, solution = text.split(":")
        assert line + ":" == task().problem(item).prompt.split("\n")[-1]
        assert task().reward(task().problem(item), response(solution)) == 1


@pytest.mark.parametrize(
    ("text", "answer", "strategy"),
    [
        (" 3+2*7", "3+2*7", "+*"),  # 35 from left to right
        ("2 * 7 + 3\n", "2*7+3", "*+"),
        ("(7*2)+3", "(7*2)+3", "*+"),
    ],
)
def test_correct_responses(text: str, answer: str, strategy: str):
    generation = response(text)
    assert task().reward(example(), generation) == 1
    assert (task().answer(example(), generation), task().strategy(example(), generation)) == (answer, strategy)


@pytest.mark.parametrize("text", ["2+7*3", "7+7+3", "2*7-3", "(3+2)*7", "23+7-13"])
def test_incorrect_expressions_have_a_strategy(text: str):
    assert task().reward(example(), response(text)) == 0
    assert task().strategy(example(), response(text)) == "".join(symbol for symbol in text if symbol in "+-*")


@pytest.mark.parametrize(
    "text",
    ["", "17", "14+3", "2*7+3=17", "2*7+3.", "(2*7+3", "2*7 3+", "-3+2*7", "2(7)+3", "3+2**7", "2*7+3 0"],
)
def test_other_responses_have_no_strategy(text: str):
    generation = response(text)
    assert (task().reward(example(), generation), task().answer(example(), generation)) == (0, None)
    assert task().strategy(example(), generation) is None


@pytest.mark.parametrize("text", ["-3(4-9)", "9(-3+8)", "3*(-4+9)"])
def test_numbers_must_be_joined_by_operators(text: str):
    problem = Problem(id="", prompt="", answer="3,4,9,15" if "4" in text else "3,8,9,45")
    assert task().reward(problem, response(text)) == 0
