"""Tests that the copies of probes have the exact strategy and answer of the response, for tasks that determine both."""

import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest
from fakes import ByLetter

from poly_epo_jax.judges.probes import PROBES, SYNONYMS, add_opening, announce, copy_of, pad, space_operators
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.types import Generation, HasAnswers, Problem, Strategic, Task

RESPONSES = {
    "polynomial_prose": [
        "Let us try x=2. We get y=4+6+7=17, therefore (x=2,y=17).",
        "Note that x = 0 is simple.\nThus y = 7.\nFinally, the answer is (x=0, y=7).",
        "We know that (1, 11) lies on it because 1+3+7=11.\nIn order to check: 1*1+3*1+7=11.\n(x=1/2, y=35/4)",
    ],
    "multiplication_prose": [
        "We calculate 343*67 = 343*(60+7) = 20580+2401 = 22981",
        "Let's split: 67 = 70-3. As a result, 343*70 - 343*3 = 24010-1029 = 22981.\nThe answer is 22981",
        "Notice that 343*67=(340+3)(70-3)=23800-1020+210-9=22981. Hence 22981",
    ],
    "countdown_prose": ["2*7+3", " (3 + 7)*2 ", "2+3*7"],
}
"""Responses with strategies and answers, by task."""
RULES = sorted({rule for rules in PROBES.values() for rule in rules}, key=lambda rule: rule.__name__)
COMPACT = {announce, pad, add_opening}
"""Rules that add sentences, with which a response to countdown_prose is not an expression."""


def meaning(task: Task, problem: Problem, text: str) -> tuple[object, object]:
    arrays = np.zeros(1, np.int32), np.zeros(1, np.float32), np.ones(1, bool)
    generation = Generation(*arrays, (text,), "stop", np.zeros(1, int))
    assert isinstance(task, Strategic) and isinstance(task, HasAnswers)
    return task.strategy(problem, generation), task.answer(problem, generation)


def task_and_problem(name: str) -> tuple[Task, Problem]:
    task = TASKS[name](num_train=1, num_held_out=1)
    answers = {"polynomial_prose": "1,3,7", "multiplication_prose": "343,67", "countdown_prose": "2,3,7,17"}
    return task, Problem("p", "?", answers[name])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", RESPONSES)
def test_each_rule_leaves_strategy_and_answer_unchanged(name: str, rule: Callable[[str], str]):
    task, problem = task_and_problem(name)
    changed = 0
    for text in RESPONSES[name]:
        before = meaning(task, problem, text)
        assert None not in before
        if name == "countdown_prose" and rule in COMPACT:
            assert copy_of(text, (rule,), problem, task) is None  # would not be an expression
            continue
        assert meaning(task, problem, rule(text)) == before, rule(text)
        changed += rule(text) != text
    assert changed or (name == "countdown_prose" and rule is not space_operators)


def test_paraphrases_change_no_number():
    for text in itertools.chain(*RESPONSES.values()):
        for rule in PROBES["paraphrase"]:
            assert re.findall(r"\d+", rule(text)) == re.findall(r"\d+", text)
    assert not any(re.search(r"[^a-z' ]", phrase) for phrase in (*SYNONYMS, *SYNONYMS.values()))


def test_a_rule_that_would_change_the_strategy_is_left_out():
    problem, task = Problem("p", "p:", "a"), ByLetter()
    assert copy_of("a", PROBES["paraphrase"], problem, task) is None
    assert copy_of("a", (lambda text: text, lambda text: text + "b"), problem, task) is None
