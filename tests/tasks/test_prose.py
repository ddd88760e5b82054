"""Tests of the free-text tasks: notations of decompositions and points, and rewards."""

import itertools
import sys
from fractions import Fraction

import numpy as np
import pytest
from responses import response

from poly_epo_jax.tasks import TASKS, MultiplicationProseTask, PolynomialProseTask
from poly_epo_jax.tasks.arithmetic import MAX_DEPTH, Product, Sum, decomposition, equations, parse_expression, value
from poly_epo_jax.types import Problem

MULTIPLICATION = MultiplicationProseTask(num_train=5, num_held_out=5)
POLYNOMIAL = PolynomialProseTask(num_train=5, num_held_out=5)
PRODUCT = Problem(id="", prompt="", answer="343,67")
CURVE = Problem(id="", prompt="", answer="1,3,7")
GRID = ((-1, (3, 3)), (-1, (3, 340)), (1, (3, 70)), (1, (70, 340)))


def graded(text: str) -> tuple[float, object]:
    return MULTIPLICATION.reward(PRODUCT, response(text)), MULTIPLICATION.strategy(PRODUCT, response(text))


@pytest.mark.parametrize("name", ["polynomial_prose", "multiplication_prose"])
def test_the_registry_builds_problems_for_chats(name: str):
    task = TASKS[name](num_train=50, num_held_out=20)
    problems = [*task.train_problems, *task.held_out_problems]
    assert len({problem.id for problem in problems}) == 70 and all(problem.chat for problem in problems)


@pytest.mark.parametrize(
    "text",
    [
        "343 * 67 = (340 + 3)(70 - 3) = 340 * 70 - 340 * 3 + 3 * 70 - 3 * 3 = 22981",
        r"We have $343 \times 67 = (340+3) \cdot (70-3)$, and that is 23,800 - 1,020 + 210 - 9 = 22,981.",
        "(340 × 70) − (340 × 3) + (3 × 70) − (3 × 3) = 22981",  # noqa: RUF001
        "343 = 340 + 3 and 67 = 70 - 3.\n(3 + 340) x (70 - 3) = 22981",
        "343 = 340 + 3, 67 = 70 - 3, and so it is 23800 - 1020 + 210 - 9 = 22981",
    ],
)
def test_one_decomposition_in_different_notations(text: str):
    assert graded(text) == (1.0, GRID)


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("343 * 67 = 343 * 60 + 343 * 7 = 20580 + 2401 = 22981", ((1, (7, 343)), (1, (60, 343)))),
        ("343*(60+7) = 20580 + 2401 = 22981", ((1, (7, 343)), (1, (60, 343)))),
        ("67 = 60 + 7; 343*60 = 20580; 343*7 = 2401; 20580 + 2401 = 22981", ((1, (7, 343)), (1, (60, 343)))),
        ("343*66 = 22638, 343*1 = 343, 67 = 66 + 1, 22638 + 343 = 22981", ((1, (1, 343)), (1, (66, 343)))),
        ("343*67 = 7*49*67 = 7*3283 = 22981", ((1, (7, 49, 67)),)),
        ("343 = 7*49, 49*67 = 3283, 7*3283 = 22981", ((1, (7, 49, 67)),)),
    ],
)
def test_other_decompositions_are_other_strategies(text: str, strategy: object):
    assert graded(text) == (1.0, strategy)


@pytest.mark.parametrize(
    "text",
    [
        "343 * 67 = 22981",
        "22981",
        "343 * 67 = 22980 + 1 = 22981",  # decomposes the result
        "343 * 67 = 1 * 343 * 67 = 22981",
        "343 * 67 = (343 + 0) * 67 = 22981",
        "(200 + 144) * 67 = 23048, less 67: 22981",  # decomposes 344
        "",
        "(" * 500,
    ],
)
def test_responses_without_a_decomposition_are_degenerate(text: str):
    assert graded(text) == (0.0, None)


@pytest.mark.parametrize(
    "text",
    [
        "343*(60+7) = 20580 + 2400 = 22981",
        "343*(60+7) = 20580 + 2401 = 22982",
        "343*(60+7) = 22981, nearly 23000",
        "343*(60+7) = 20580 + 2401",
        "343*(60+7) = 22981. And 2 + 2 = 5. So 22981",
    ],
)
def test_an_incorrect_step_or_result_earns_0_and_keeps_its_strategy(text: str):
    reward, strategy = graded(text)
    assert reward == 0 and strategy == ((1, (7, 343)), (1, (60, 343)))


def test_a_product_of_sums_equals_its_expansion():
    rng = np.random.default_rng(0)

    def parts(total: int) -> list[int]:
        others = [int(part) for part in rng.integers(1, total, rng.integers(0, 3)) * rng.choice((-1, 1))]
        return [first, *others] if (first := total - sum(others)) > 0 else [total]

    def written(terms: list[int]) -> str:
        return f"({''.join(f'{term:+d}' for term in terms).removeprefix('+')})" if len(terms) > 1 else str(terms[0])

    for _ in range(500):
        a, b = (int(rng.integers(20, 900)) for _ in range(2))
        left, right = parts(a), parts(b)
        terms = [(r * c, f"{abs(r)}*{abs(c)}") for r, c in itertools.product(left, right)]
        distributed = "".join(f"{'-' if signed < 0 else '+'}{text}" for signed, text in terms).removeprefix("+")
        factored, expanded = parse_expression(f"{written(left)}*{written(right)}"), parse_expression(distributed)
        assert factored is not None and expanded is not None
        assert decomposition(factored, a, b) == decomposition(expanded, a, b)
        assert (decomposition(factored, a, b) is None) == (len(left) == len(right) == 1)
        assert decomposition(factored, a, b + 1) is None and decomposition(expanded, a, b + 1) is None


def test_values_equal_python_results():
    rng = np.random.default_rng(0)

    def expression(depth: int) -> str:
        if depth == 0 or rng.random() < 0.3:
            return str(rng.integers(0, 1000))
        return f"({expression(depth - 1)}{rng.choice(list('+-*'))}{expression(depth - 1)})"

    for _ in range(500):
        text = expression(4)
        found = parse_expression(text)
        assert found is not None and value(found) == eval(text)


@pytest.mark.parametrize("text", ["", "1 2", "(1", "1)", "2**3", "1/2", "1+", "*2", "()", "x"])
def test_other_text_does_not_parse(text: str):
    assert parse_expression(text) is None


def test_nesting_is_limited_and_does_not_overflow_the_stack():
    def nested(depth: int) -> str:
        return "(" * depth + "1" + ")" * depth

    def below(frames: int, text: str) -> object:
        return parse_expression(text) if frames == 0 else below(frames - 1, text)

    assert parse_expression(nested(MAX_DEPTH)) == 1
    assert parse_expression(nested(MAX_DEPTH + 1)) is None
    assert below(sys.getrecursionlimit() // 2, nested(1999)) is None
    assert graded(f"343*67 = 343*(60+7) = {nested(1500)}")[0] == 0.0


def test_long_steps_are_read_completely():
    for terms, reward in ((67, 1.0), (66, 0.0)):
        step = " + ".join(["343"] * terms)
        assert len(step) > 300
        assert graded(f"343 * 67 = 343 * (60 + 7) = {step} = 22981")[0] == reward


def test_formulas_are_extracted_in_order():
    assert equations("So 2*3 = 6, and 4(5+1)=24. The end") == [
        [Product((2, 3)), 6],
        [Product((4, Sum(((1, 5), (1, 1))))), 24],
    ]


@pytest.mark.parametrize(
    ("text", "point", "reward"),
    [
        ("(x=1, y=11)", (1, 11), 1.0),
        ("Not (0, 8). Take x = -1, y = 5.", (-1, 5), 1.0),
        ("(x=\N{MINUS SIGN}1, y=5)", (-1, 5), 1.0),
        ("x = 1/2 and y = 35/4", (Fraction(1, 2), Fraction(35, 4)), 1.0),
        ("$(0.5, 8.75)$", (Fraction(1, 2), Fraction(35, 4)), 1.0),
        ("(x=1, y=11) or (x=1, y=12)", (1, 12), 0.0),
        ("x is one and y eleven", None, 0.0),
        ("(1, 11, 12)", None, 0.0),
        ("(x=1, y=11/0)", None, 0.0),
    ],
)
def test_the_last_pair_is_the_answer(text: str, point: object, reward: float):
    assert POLYNOMIAL.strategy(CURVE, response(text)) == point
    assert POLYNOMIAL.reward(CURVE, response(text)) == reward
    assert POLYNOMIAL.answer(CURVE, response(text)) == (point and f"({point[0]}, {point[1]})")  # pyright: ignore
