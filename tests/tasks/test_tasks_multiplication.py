"""Tests of the multiplication task: grading, strategies, demonstrations and problem splits."""

import itertools

import numpy as np
import pytest
from responses import response

from poly_epo_jax.tasks import TASKS, DemonstrationStyle, MultiplicationTask
from poly_epo_jax.tasks.multiplication import DecompositionStrategy
from poly_epo_jax.types import Problem

CLEAN = DemonstrationStyle()


def every_problem(**settings) -> list[Problem]:
    task = MultiplicationTask(**settings)
    return [*task.train_problems, *task.held_out_problems]


def product(a: int, b: int) -> Problem:
    return Problem(id="", prompt=f"{a}*{b}:", answer=f"{a},{b}")


def operands(problem: Problem) -> tuple[int, int]:
    a, b = problem.prompt.removesuffix(":").split("*")
    return int(a), int(b)


def strategy_of(task: MultiplicationTask, problem: Problem, text: str) -> DecompositionStrategy:
    strategy = task.strategy(problem, response(text))
    assert strategy is not None
    return strategy


def respond(front: int, first: int, symbol: str, second: int) -> str:
    """Builds a correct response independently of the task."""
    if symbol == "*":
        return f"{front}*({first}*{second})={front * first}*{second}={front * first * second}"
    total = front * first + front * second if symbol == "+" else front * first - front * second
    return f"{front}*({first}{symbol}{second})={front * first}{symbol}{front * second}={total}"


def is_right(a: int, b: int, text: str) -> bool:
    """Returns True if a response is correct. Reference implementation, independent of the task.

    The strategy must be valid for a * b, and the response must be the correct calculation for it.
    """
    for front, whole in ((a, b), (b, a)):
        for symbol in "+-*":
            head, _, tail = text.partition("(")
            first, _, rest = tail.partition(symbol)
            second = rest.partition(")")[0]
            if head != f"{front}*" or not (first.isdecimal() and second.isdecimal()):
                continue
            p, q = int(first), int(second)
            makes = {"+": p + q, "-": p - q, "*": p * q}[symbol] == whole
            trivial = 0 in (p, q) or (symbol == "*" and 1 in (p, q))
            if makes and not trivial and text == respond(front, p, symbol, q):
                return True
    return False


def test_the_registry_builds_it_by_name():
    assert isinstance(TASKS["multiplication"](seed=1), MultiplicationTask)


def test_default_problems_are_all_720_products():
    problems = every_problem()
    assert {operands(p) for p in problems} == {(a, b) for a in range(2, 10) for b in range(10, 100)}
    assert len({p.id for p in problems}) == len(problems) == 720
    assert max(len(p.prompt) for p in problems) == len("7*23:") == 5


@pytest.mark.parametrize("answer", [(7, 23), (9, 99), (12, 96)])
def test_all_strategies_with_small_parts_are_graded(answer):
    """Correct calculations are rewarded exactly if the parts yield the operand and are not trivial."""
    a, b = answer
    task, problem = MultiplicationTask(), product(a, b)
    for front, symbol, p, q in itertools.product((a, b), "+-*", range(100), range(15)):
        whole = b if front == a else a
        text = respond(front, p, symbol, q)
        # Degenerate: a part of 0, a factor of 1, or a result that is not positive.
        degenerate = 0 in (p, q) or (symbol == "*" and 1 in (p, q)) or (symbol == "-" and p <= q)
        parts = (p, q) if symbol == "-" else (max(p, q), min(p, q))
        assert task.strategy(problem, response(text)) == (None if degenerate else (whole, symbol, parts))
        makes_operand = {"+": p + q, "-": p - q, "*": p * q}[symbol] == whole
        assert task.reward(problem, response(text)) == float(makes_operand and not degenerate)


@pytest.mark.parametrize(
    "text",
    [
        "7*(20+3)=140+21=161",
        "7*(3+20)=21+140=161",
        "7*(25-2)=175-14=161",
        "7*(1000-977)=7000-6839=161",
        "23*(5+2)=115+46=161",
        "23*(10-3)=230-69=161",
    ],
)
def test_correct_responses(text):
    assert MultiplicationTask().reward(product(7, 23), response(text)) == 1


@pytest.mark.parametrize("text", ["8*(6*4)=48*4=192", "8*(4*6)=32*6=192", "24*(2*4)=48*4=192"])
def test_correct_factorizations(text):
    assert MultiplicationTask().reward(product(8, 24), response(text)) == 1


def test_the_order_of_commutative_parts_does_not_change_the_strategy():
    task = MultiplicationTask()
    pairs = [
        (product(7, 23), "7*(20+3)=140+21=161", "7*(3+20)=21+140=161"),
        (product(8, 24), "8*(6*4)=48*4=192", "8*(4*6)=32*6=192"),
    ]
    for problem, one, other in pairs:
        assert task.strategy(problem, response(one)) == task.strategy(problem, response(other))
    # Subtraction is not commutative: 2 - 25 is a different strategy, and incorrect.
    reverse = task.strategy(product(7, 23), response("7*(2-25)=14-175=161"))
    assert reverse is not None
    assert reverse != task.strategy(product(7, 23), response("7*(25-2)=175-14=161"))
    assert task.reward(product(7, 23), response("7*(2-25)=14-175=161")) == 0


def test_operand_operator_and_parts_distinguish_strategies():
    task, problem = MultiplicationTask(), product(12, 24)
    texts = [
        "24*(10+2)=240+48=288",
        "24*(14-2)=336-48=288",
        "24*(6*2)=144*2=288",
        "24*(4*3)=96*3=288",
        "12*(22+2)=264+24=288",
        "12*(12*2)=144*2=288",
        "12*(12+12)=144+144=288",
    ]
    assert all(task.reward(problem, response(text)) == 1 for text in texts)
    assert len({task.strategy(problem, response(text)) for text in texts}) == len(texts)


def test_incorrect_arithmetic_keeps_its_strategy_and_incorrect_strategies_are_separate():
    task, problem = MultiplicationTask(), product(7, 23)
    right = task.strategy(problem, response("7*(20+3)=140+21=161"))
    for text in ("7*(20+3)=150+21=171", "7*(20+3)=140+21=162", "7*(20+3)=1+1=1", "7*(3+20)=140+21=161"):
        assert task.strategy(problem, response(text)) == right
        assert task.reward(problem, response(text)) == 0
    incorrect = task.strategy(problem, response("7*(20+4)=140+28=168"))
    assert incorrect not in (None, right)
    assert task.reward(problem, response("7*(20+4)=140+28=168")) == 0
    assert task.reward(problem, response("7*(20+4)=140+21=161")) == 0


def test_the_operand_of_a_square_is_identified_by_its_value():
    task, problem = MultiplicationTask(), product(12, 12)
    assert task.strategy(problem, response("12*(10+2)=120+24=144")) == (12, "+", (10, 2))
    assert task.reward(problem, response("12*(10+2)=120+24=144")) == 1
    assert task.reward(problem, response("12*(4*3)=48*3=144")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "168",
        "7*24=168",
        "7*(20+4)=168",
        "7*(20+4)=140+28",
        "7*(20+4)=140+28=",
        "7*(20+4)=140+28=168\n",
        " 7*(20+4)=140+28=168",
        "7*(20+4)=140+28=168 ",
        "7 * (20+4)=140+28=168",
        "7*(20+4)=140+28=168=168",
        "7*(20+4)=140+28=1687*(20+4)=140+28=168:",
        "7*(20+4)=140+28=168;7*(20+4)=140+28=168",
        "7*24:7*(20+4)=140+28=168",
        "7*(20+4)=140+28=0168",
        "07*(20+4)=140+28=168",
        "7*(020+4)=140+28=168",
        "7*(20+04)=140+28=168",
        "7*(+20+4)=140+28=168",
        "7*(20++4)=140+28=168",
        "7*(20--4)=140--28=168",
        "7*(-4+28)=-28+196=168",
        "-7*(20+4)=140+28=168",
        "7*(20+4)=140-28=168",
        "7*(20+4)=140*28=168",
        "7*(20/4)=140/28=168",
        "7*(24+0)=168+0=168",
        "7*(0+24)=0+168=168",
        "7*(24-0)=168-0=168",
        "7*(24*1)=168*1=168",
        "7*(1*24)=7*24=168",
        "24*(7*1)=168*1=168",
        "7*(20+3+1)=140+21+7=168",
        "(20+4)*7=140+28=168",
        "7*(2\u0660+4)=140+28=168",
        "\uff17*(20+4)=140+28=168",
        "7\u00d7(20+4)=140+28=168",
        "7*(25\u22121)=175\u22127=168",
        "7*(20+4)=140+28=1_68",
        "7*(20+4)=140+28=168.0",
        "7*(99999999-99999975)=699999993-699999825=168",
        "7*(20+4)=140+28=" + "9" * 10_000,
        "8*(20+1)=160+8=168",
        "28*(5+1)=140+28=168",
        "1*(100+68)=100+68=168",
        "<eos>",
    ],
)
def test_malformed_text_is_degenerate(text):
    task, problem = MultiplicationTask(), product(7, 24)
    assert task.reward(problem, response("7*(20+4)=140+28=168")) == 1
    assert task.strategy(problem, response(text)) is None
    assert task.reward(problem, response(text)) == 0


@pytest.mark.parametrize("settings", [{}, dict(digits=(2, 2)), dict(digits=(3, 2))])
def test_demonstrations_without_mistakes_are_correct_and_listed(settings):
    task = MultiplicationTask(**settings)
    rng = np.random.default_rng(1)
    for problem in task.train_problems[::3]:
        text = task.demonstration(problem, rng, CLEAN)
        assert is_right(*operands(problem), text)
        assert task.reward(problem, response(text)) == 1
        assert task.strategy(problem, response(text)) in task.strategies(problem)
        assert set(problem.prompt + text) <= set(task.alphabet)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, dict(digits=(2, 2)), dict(digits=(3, 1))])
def test_every_problem_has_at_least_12_correct_strategies(settings):
    task = MultiplicationTask(**settings)
    for problem in every_problem(**settings):
        a, b = operands(problem)
        strategies = task.strategies(problem)
        assert len(set(strategies)) == len(strategies) >= 12
        for operand, symbol, (p, q) in strategies:
            text = respond(a + b - operand, p, symbol, q)
            assert is_right(a, b, text)
            assert task.reward(problem, response(text)) == 1
            assert strategy_of(task, problem, text) == (operand, symbol, (p, q))


def test_strategies_are_in_rank_order():
    strategies = [f"{p}{symbol}{q}" for _, symbol, (p, q) in MultiplicationTask().strategies(product(8, 23))]
    steps_of_23 = ["22+1", "24-1", "21+2", "25-2", "26-3", "19+4", "27-4"]  # 20+3 is the split by place value
    steps_of_8 = ["7+1", "9-1", "6+2", "5+3", "11-3", "4+4", "12-4"]  # 10-2 is the compensation to a round number
    assert strategies == ["20+3", "30-7", "10-2", *steps_of_23, *steps_of_8, "4*2"]


def test_three_digit_operands_split_at_both_places():
    task = MultiplicationTask(digits=(3, 2))
    strategies = [f"{p}{symbol}{q}" for _, symbol, (p, q) in task.strategies(product(343, 67))]
    assert strategies[:6] == ["340+3", "300+43", "60+7", "350-7", "400-57", "70-3"]


@pytest.mark.parametrize("answer", [(8, 24), (7, 23), (2, 10)])
def test_no_single_edit_of_a_correct_response_is_correct(answer):
    a, b = answer
    task, problem = MultiplicationTask(), product(a, b)
    for operand, symbol, (p, q) in task.strategies(problem):
        text = respond(a + b - operand, p, symbol, q)
        for i in range(len(text) + 1):
            edits = [text[:i] + text[i + 1 :]] if i < len(text) else []
            edits += [text[:i] + c + text[i + k :] for c in task.alphabet for k in (0, 1)]
            for edit in set(edits) - {text}:
                assert task.reward(problem, response(edit)) == 0
                assert not is_right(a, b, edit)


def test_mistakes_have_the_expected_rate_and_size():
    task, problem, draws = MultiplicationTask(), product(7, 24), 4_000
    rng = np.random.default_rng(2)
    texts = [task.demonstration(problem, rng, DemonstrationStyle(error_rate=1.0)) for _ in range(draws)]
    wrong = np.array([task.reward(problem, response(text)) == 0 for text in texts])
    strategies = task.strategies(problem)
    # Mistakes do not change the strategy.
    ranks = np.array([strategies.index(strategy_of(task, problem, text)) for text in texts])
    expected = np.mean([0.15 + 0.01 * rank for rank in range(len(strategies))])
    assert 0.2 < expected < 0.3
    assert abs(wrong.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / draws)
    low, high = wrong[ranks < 5].mean(), wrong[ranks >= len(strategies) - 5].mean()
    assert high - low > 0.05
    # Each of the three steps is the first incorrect one in some demonstrations.
    mistakes = set()
    for text, is_wrong in zip(texts, wrong, strict=True):
        operand, symbol, (p, q) = strategy_of(task, problem, text)
        steps, right = (t.replace(symbol, "=").split("=")[-3:] for t in (text, respond(24 + 7 - operand, p, symbol, q)))
        differences = [int(s) - int(r) for s, r in zip(steps, right, strict=True)]
        assert any(differences) == is_wrong
        if is_wrong:
            first = next(i for i, d in enumerate(differences) if d)
            mistakes.add((first, differences[first]))
    assert mistakes == set(itertools.product(range(3), (-1, 1, 10)))


def test_demonstrations_with_mistakes_parse_and_earn_0():
    task, rng = MultiplicationTask(), np.random.default_rng(3)
    for problem in every_problem()[::2]:
        text = task.demonstration(problem, rng, DemonstrationStyle(error_rate=100.0))
        assert task.reward(problem, response(text)) == 0
        assert task.strategy(problem, response(text)) in task.strategies(problem)


def test_the_longest_default_demonstration_has_22_characters():
    task, longest = MultiplicationTask(), 0
    for problem in every_problem():
        a, b = operands(problem)
        for operand, symbol, (p, q) in task.strategies(problem):
            longest = max(longest, len(respond(a + b - operand, p, symbol, q)))
    assert longest == len("99*(13-4)=1287-396=891") == 22


@pytest.mark.parametrize("skew", [0.0, 0.2, 1.0])
def test_skew_concentrates_on_the_first_ranks(skew):
    task, problem, draws = MultiplicationTask(), product(7, 23), 2_000
    rng = np.random.default_rng(4)
    strategies = task.strategies(problem)
    drawn = [
        task.strategy(problem, response(task.demonstration(problem, rng, DemonstrationStyle(skew=skew))))
        for _ in range(draws)
    ]
    weights = [np.e ** (-skew * k) for k in range(len(strategies))]
    for strategy, weight in zip(strategies, weights, strict=True):
        expected = weight / sum(weights)
        assert (
            abs(drawn.count(strategy) / draws - expected) <= 4 * np.sqrt(expected * (1 - expected) / draws) + 1 / draws
        )


@pytest.mark.parametrize("settings", [{}, dict(digits=(2, 2)), dict(digits=(3, 3)), dict(digits=(2, 1))])
def test_splits_are_disjoint_and_follow_the_seed(settings):
    task, same = MultiplicationTask(seed=3, **settings), MultiplicationTask(seed=3, **settings)
    other = MultiplicationTask(seed=4, **settings)
    assert (len(task.train_problems), len(task.held_out_problems)) == (600, 120)
    products = [frozenset(operands(p)) for p in [*task.train_problems, *task.held_out_problems]]
    assert len(set(products)) == 720
    assert all(len(pair) == 2 for pair in products)
    assert (task.train_problems, task.held_out_problems) == (same.train_problems, same.held_out_problems)
    assert {p.id for p in task.held_out_problems} != {p.id for p in other.held_out_problems}
    lengths = {tuple(len(str(o)) for o in operands(p)) for p in task.train_problems}
    assert lengths == {settings.get("digits", (1, 2))}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(num_train=601), "num_train=601 and num_held_out=120 .* at most 720"),
        (dict(digits=(0, 2)), r"digits=\(0, 2\)"),
        (dict(digits=(2, 4)), r"digits=\(2, 4\)"),
        (dict(digits=(1, 1)), r"digits=\(1, 1\)"),
    ],
)
def test_impossible_settings_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        MultiplicationTask(**settings)
