"""Tests of the polynomial task: grading, strategies, demonstrations and problem splits."""

import itertools
import re

import numpy as np
import pytest
from responses import response

from poly_epo_jax.tasks import TASKS, DemonstrationStyle, PolynomialTask
from poly_epo_jax.types import Problem

CLEAN = DemonstrationStyle()


def every_problem(**settings) -> list[Problem]:
    task = PolynomialTask(**settings)
    return [*task.train_problems, *task.held_out_problems]


def curve(prompt: str, x: int) -> int:
    """Evaluates the text of the prompt. Reference implementation, independent of the task."""
    relation = re.sub(r"(\d)x", r"\1*x", prompt.removeprefix("y=").removesuffix(":")).replace("^", "**")
    return eval(relation, {"x": x})


def test_the_registry_builds_it_by_name():
    assert isinstance(TASKS["polynomial"](seed=1), PolynomialTask)


def test_default_problems_are_all_150_lines():
    problems = every_problem()
    lines = {(curve(p.prompt, 1) - curve(p.prompt, 0), curve(p.prompt, 0)) for p in problems}
    assert lines == {(a, c) for a in (-3, -2, -1, 1, 2, 3) for c in range(-12, 13)}
    assert len(problems) == len({p.prompt for p in problems}) == len({p.id for p in problems}) == 150
    assert max(len(p.prompt) for p in problems) == len("y=-3x-12:") == 9


@pytest.mark.parametrize(
    ("degree", "answer", "prompt"),
    [
        (1, "2,-5", "y=2x-5:"),
        (1, "-1,0", "y=-x:"),
        (1, "1,12", "y=x+12:"),
        (2, "1,3,1", "y=x^2+3x+1:"),
        (2, "-2,-1,0", "y=-2x^2-x:"),
        (2, "3,0,-1", "y=3x^2-1:"),
        (3, "-1,0,1,-2", "y=-x^3+x-2:"),
        (3, "2,-3,0,0", "y=2x^3-3x^2:"),
    ],
)
def test_prompts(degree, answer, prompt):
    problems = every_problem(degree=degree, num_train=6 * 7 ** (degree - 1) * 25, num_held_out=0)
    assert {p.answer: p.prompt for p in problems}[answer] == prompt


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_reward_is_one_exactly_on_the_curve(degree):
    task = PolynomialTask(degree=degree, seed=degree)
    rng = np.random.default_rng(0)
    for i in rng.choice(110, size=8, replace=False):
        problem = task.train_problems[i]
        for x in range(-99, 100):
            for y in {curve(problem.prompt, x) + d for d in (-10, -1, 0, 1, 10)} | {-curve(problem.prompt, x), 0}:
                text = f"(x={x},y={y})"
                nameable = abs(y) <= 9999
                assert task.reward(problem, response(text)) == float(nameable and y == curve(problem.prompt, x))
                assert task.strategy(problem, response(text)) == ((x, y) if nameable else None)


def test_only_canonical_integers_parse():
    """A short spelling of x or y is parsed exactly if Python prints its integer that way."""
    task = PolynomialTask()
    problem = task.train_problems[0]

    def canonical(spelling, digits):
        try:
            return str(int(spelling)) == spelling and len(spelling.removeprefix("-")) <= digits
        except ValueError:
            return False

    for length in range(4):
        for characters in itertools.product("0123459-+ _", repeat=length):
            spelling = "".join(characters)
            as_x = task.strategy(problem, response(f"(x={spelling},y=3)"))
            as_y = task.strategy(problem, response(f"(x=3,y={spelling})"))
            assert as_x == ((int(spelling), 3) if canonical(spelling, 2) else None)
            assert as_y == ((3, int(spelling)) if canonical(spelling, 4) else None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x=0,y=5",
        "(x=0,y=5",
        "x=0,y=5)",
        "(x=0, y=5)",
        " (x=0,y=5)",
        "(x=0,y=5) ",
        "(x=0,y=5)\n",
        "\n(x=0,y=5)",
        "(x=0,y=5)\x00",
        "(x=0,y=05)",
        "(x=00,y=5)",
        "(x=-0,y=5)",
        "(x=0,y=+5)",
        "(x=0,y=--5)",
        "(x=0,y=5.0)",
        "(x=0,y=5e0)",
        "(x=0,y=0x5)",
        "(x=0,y=\u0665)",
        "(x=0,y=\uff15)",
        "(x=\u0660,y=5)",
        "(x=0,y=\u00b2)",
        "(x=0,y=\u22125)",
        "(x=0,y=5)(x=0,y=5)",
        "(x=0,y=5),(x=1,y=6)",
        "((x=0,y=5))",
        "(X=0,y=5)",
        "(y=5,x=0)",
        "(x=,y=5)",
        "(x=0,y=)",
        "(x=100,y=5)",
        "(x=0,y=10000)",
        "(x=0,y=" + "9" * 10_000 + ")",
        "y=x+5:(x=0,y=5)",
        "<eos>",
    ],
)
def test_malformed_text_is_degenerate(text):
    task = PolynomialTask()
    problem = Problem(id="", prompt="y=x+5:", answer="1,5")
    assert task.reward(problem, response("(x=0,y=5)")) == 1
    assert task.strategy(problem, response(text)) is None
    assert task.reward(problem, response(text)) == 0


def test_the_paper_example():
    task = PolynomialTask(degree=2)
    problem = Problem(id="", prompt="y=x^2+3x+7:", answer="1,3,7")
    assert task.reward(problem, response("(x=1,y=11)")) == 1
    assert task.reward(problem, response("(x=1,y=10)")) == 0
    assert task.strategies(problem)[:5] == [(0, 7), (1, 11), (-1, 5), (2, 17), (-2, 5)]


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_demonstrations_without_mistakes_are_correct_and_listed(degree):
    task = PolynomialTask(degree=degree)
    rng = np.random.default_rng(1)
    for problem in [*task.train_problems, *task.held_out_problems]:
        listed = task.strategies(problem)
        assert sorted(listed) == [(x, curve(problem.prompt, x)) for x in range(-9, 10)]
        for _ in range(5):
            text = task.demonstration(problem, rng, CLEAN)
            assert task.reward(problem, response(text)) == 1
            assert task.strategy(problem, response(text)) in listed
            assert set(problem.prompt + text) <= set(task.alphabet)


def test_the_longest_default_demonstration_has_12_characters():
    task = PolynomialTask()
    points = [point for problem in every_problem() for point in task.strategies(problem)]
    assert max(len(f"(x={x},y={y + slip})") for x, y in points for slip in (-2, 0, 2)) == 12


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_mistakes_have_the_expected_rate(scale):
    task = PolynomialTask()
    problem, draws = task.train_problems[0], 6_000
    rng = np.random.default_rng(2)
    drawn = [
        task.strategy(problem, response(task.demonstration(problem, rng, DemonstrationStyle(error_rate=scale))))
        for _ in range(draws)
    ]
    x, slip = np.array([(p[0], p[1] - curve(problem.prompt, p[0])) for p in drawn if p is not None]).T
    assert len(x) == draws
    assert set(slip.tolist()) == {-2, -1, 0, 1, 2}
    for size in range(10):
        wrong = slip[np.abs(x) == size] != 0
        expected = scale * (0.02 if size == 0 else 0.1 + 0.03 * size)
        assert abs(wrong.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / len(wrong))
    if scale == 1.0:
        assert 0.2 < (slip != 0).mean() < 0.3


@pytest.mark.parametrize("skew", [0.0, 0.2, 1.0])
def test_skew_concentrates_on_small_x(skew):
    task = PolynomialTask()
    problem, draws = task.train_problems[0], 4_000
    rng = np.random.default_rng(3)
    points = [
        task.strategy(problem, response(task.demonstration(problem, rng, DemonstrationStyle(skew=skew))))
        for _ in range(draws)
    ]
    ranked_x = [0] + [sign * size for size in range(1, 10) for sign in (1, -1)]
    weights = [np.e ** (-skew * k) for k in range(19)]
    for x, weight in zip(ranked_x, weights, strict=True):
        expected = weight / sum(weights)
        observed = sum(point is not None and point[0] == x for point in points) / draws
        assert abs(observed - expected) <= 4 * np.sqrt(expected * (1 - expected) / draws) + 1 / draws


def test_demonstrations_are_reproducible():
    task, style = PolynomialTask(), DemonstrationStyle(error_rate=1.0, skew=0.1)
    first, again = (
        [task.demonstration(p, rng, style) for p in task.train_problems]
        for rng in (np.random.default_rng(4), np.random.default_rng(4))
    )
    assert first == again


def test_splits_are_disjoint_and_follow_the_seed():
    task, same, other = PolynomialTask(seed=3), PolynomialTask(seed=3), PolynomialTask(seed=4)
    assert (len(task.train_problems), len(task.held_out_problems)) == (110, 40)
    assert not {p.prompt for p in task.train_problems} & {p.prompt for p in task.held_out_problems}
    assert (task.train_problems, task.held_out_problems) == (same.train_problems, same.held_out_problems)
    assert {p.id for p in task.held_out_problems} != {p.id for p in other.held_out_problems}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(num_train=111), "num_train=111 and num_held_out=40 .* at most 150"),
        (dict(degree=3, max_x=20), "y=25272"),
    ],
)
def test_impossible_settings_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        PolynomialTask(**settings)
