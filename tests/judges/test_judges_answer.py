"""Tests of the judge that clusters responses by final answers, and of the judge that does not cluster."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from responses import response

from poly_epo_jax.config.keys import ConfigError, JudgeSection
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.judges.answer import first_equal_index
from poly_epo_jax.startup.read_config import make_judge
from poly_epo_jax.tasks import PolynomialTask
from poly_epo_jax.types import DEGENERATE_CLUSTER, Clustering, Generation, Group, Problem, Task

PROBLEM = Problem(id="p", prompt="1/2?", answer="0.5")


class Numbers:
    """A task whose answers are the numbers after "=". The response "?" has no answer."""

    train_problems: Sequence[Problem] = (PROBLEM,)
    held_out_problems: Sequence[Problem] = ()

    def __init__(self):
        self.compared: list[tuple[str, str]] = []

    def reward(self, problem: Problem, generation: Generation) -> float:
        return 0.0

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        return None if generation.text == "?" else generation.text.partition("=")[2]

    def same_answer(self, problem: Problem, first: str, second: str) -> bool:
        self.compared.append((first, second))
        return float(first) == float(second)


def cluster(name: str, task: Task, texts: list[str]) -> np.ndarray:
    judge = make_judge(JudgeSection(name=name), task)
    group = Group(PROBLEM, np.zeros(1, np.int32), tuple(map(response, texts)))
    clustering = asyncio.run(judge.cluster(group))
    assert isinstance(clustering, Clustering)
    assert clustering.ids.dtype == np.int32 and not clustering.features
    return clustering.ids


def test_equal_answers_share_a_cluster_for_different_spellings():
    task = Numbers()
    clusters = cluster("answer", task, ["x=1", "y=2", "?", "z=1.0", "so=2", "=1", "?", "=3"])
    np.testing.assert_array_equal(clusters, [0, 1, DEGENERATE_CLUSTER, 0, 1, 0, DEGENERATE_CLUSTER, 2])
    # Each spelling is compared once, with one answer of each cluster.
    assert task.compared == [("1", "2"), ("1", "1.0"), ("1", "3"), ("2", "3")]


def test_answers_never_have_the_degenerate_id_in_large_groups():
    clusters = cluster("answer", Numbers(), [f"={i}" for i in range(150)])
    assert len(set(clusters.tolist())) == 150 and DEGENERATE_CLUSTER not in clusters


def test_the_first_equal_answer_is_found_if_equality_is_not_transitive():
    near = lambda i, j: abs(int(answers[i]) - int(answers[j])) <= 1  # noqa: E731
    answers = ["1", "2", "3", "5", "4"]
    assert first_equal_index(answers, near) == [0, 0, 2, 3, 2]
    assert first_equal_index([None, None], near) == [None, None]


def test_a_task_without_answers_is_rejected():
    class NoAnswers:
        train_problems: Sequence[Problem] = (PROBLEM,)
        held_out_problems: Sequence[Problem] = ()

        def reward(self, problem: Problem, generation: Generation) -> float:
            return 0.0

    message = r"judge\.name='answer' .*answer.* NoAnswers.* llm, ngrams, none"
    with pytest.raises(ConfigError, match=message):
        make_judge(JudgeSection(name="answer"), NoAnswers())


def test_points_of_polynomials_are_answers():
    task = PolynomialTask()
    texts = ["(x=0,y=5)", "(x=0,y=6)", "none", "(x=0,y=5)"]
    assert cluster("answer", task, texts).tolist() == [0, 1, DEGENERATE_CLUSTER, 0]


def test_the_judge_none_returns_no_clustering():
    judge = make_judge(JudgeSection(name="none"), Numbers())
    assert asyncio.run(judge.cluster(Group(PROBLEM, np.zeros(1, np.int32), (response("=1"), response("=2"))))) is None
    assert [name for name, judge in JUDGES.items() if not judge.clusters] == ["none"]


@pytest.mark.parametrize("answer", [3, 0.5, ["0.5"], b"0.5"])
def test_an_answer_that_is_no_text_is_rejected(answer: object):
    """An evaluation would write it to generations.jsonl, which could then not be read."""

    class Odd(Numbers):
        def answer(self, problem: Problem, generation: Generation) -> Any:
            return answer

    with pytest.raises(
        ValueError, match=rf"^Odd\.answer returned .*\({type(answer).__name__}\) for problem 'p'; return a"
    ):
        cluster("answer", Odd(), ["a"])
