"""Tests of the judge that clusters responses by the strategy of the task."""

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from responses import response

from poly_epo_jax.config.keys import ConfigError, JudgeSection
from poly_epo_jax.judges.exact import ExactJudge
from poly_epo_jax.rollouts.grading import grade_groups
from poly_epo_jax.set_rl import DEGENERATE_CLUSTER
from poly_epo_jax.startup.read_config import make_judge
from poly_epo_jax.tasks import MultiplicationTask, PolynomialTask
from poly_epo_jax.types import Group, JudgeFailure, Problem

PROBLEM = Problem(id="p", prompt="y=x+5:", answer="1,5")


class FirstWord:
    """A task whose strategy is the first word of a response."""

    train_problems: Sequence[Problem] = (PROBLEM,)
    held_out_problems: Sequence[Problem] = ()

    def reward(self, problem, generation):
        return 0.0

    def strategy(self, problem, generation):
        return generation.text.split()[0] if generation.text else None


class NoStrategies:
    """A task without strategies."""

    train_problems: Sequence[Problem] = (PROBLEM,)
    held_out_problems: Sequence[Problem] = ()

    def reward(self, problem, generation):
        return 0.0


def group(texts, problem=PROBLEM) -> Group:
    return Group(problem, np.zeros(1, np.int32), tuple(map(response, texts)))


def cluster(judge, texts, problem=PROBLEM) -> np.ndarray:
    return asyncio.run(judge.cluster(group(texts, problem))).ids


def test_ids_are_numbered_by_first_appearance():
    clusters = cluster(make_judge(JudgeSection(name="exact"), FirstWord()), ["b 1", "a", "", "b 2", "c", "a 3", ""])
    np.testing.assert_array_equal(clusters, [0, 1, 100, 0, 2, 1, 100])
    assert clusters.dtype == np.int32
    assert DEGENERATE_CLUSTER == 100


def test_groups_are_judged_independently():
    judge = ExactJudge(FirstWord())
    assert cluster(judge, ["a", "b"]).tolist() == cluster(judge, ["b", "c"]).tolist() == [0, 1]


def test_strategies_never_have_the_degenerate_id_in_large_groups():
    texts = [str(i) for i in range(150)] + [""] + [str(i) for i in range(150)]
    clusters = cluster(ExactJudge(FirstWord()), texts)
    expected = [*range(99), *range(101, 152)]
    np.testing.assert_array_equal(clusters, [*expected, 100, *expected])


def test_errors_replace_the_given_fraction_of_the_labels():
    """Responses with an error are in one of N random clusters, so 1 / N of them remain with the others."""
    texts = ["a"] * 400 + [""] * 100
    judge = make_judge(JudgeSection(name="exact", options={"error_rate": 0.3}), FirstWord())
    problems = [Problem(id=str(i), prompt="", answer="") for i in range(20)]
    clusters = np.stack([cluster(judge, texts, problem) for problem in problems])
    assert (clusters[:, 400:] == DEGENERATE_CLUSTER).all() and not (clusters[:, :400] == DEGENERATE_CLUSTER).any()
    largest = [np.bincount(row[:400]).max() for row in clusters]
    np.testing.assert_allclose(np.mean(largest) / 400, 0.7 + 0.3 / 500, atol=4 * np.sqrt(0.21 / 8000))
    assert len(np.unique(clusters, axis=0)) == 20
    np.testing.assert_array_equal(cluster(judge, texts, problems[3]), clusters[3])


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_errors_do_not_change_which_responses_are_degenerate(rate: float):
    texts = ["a", "", "b", "", "c"] * 40
    ids = cluster(ExactJudge(FirstWord(), error_rate=rate), texts)
    np.testing.assert_array_equal(ids == DEGENERATE_CLUSTER, [not text for text in texts])


def test_errors_depend_on_the_tokens():
    judge, first = ExactJudge(FirstWord(), error_rate=1.0), group(["a"] * 50)
    changed = dataclasses.replace(first.generations[49], token_ids=first.generations[49].token_ids + 1)
    second = dataclasses.replace(first, generations=(*first.generations[:49], changed))
    first_ids, second_ids = (asyncio.run(judge.cluster(graded)).ids for graded in (first, second))
    assert (first_ids != second_ids).any()
    assert cluster(ExactJudge(FirstWord(), error_rate=0.0), ["a"] * 50).tolist() == [0] * 50


def test_a_strategy_that_cannot_be_compared_is_rejected():
    class Listed(FirstWord):
        def strategy(self, problem, generation):
            return generation.text.split()

    problem = Problem(id="p\x1b[2J", prompt="", answer="")
    with pytest.raises(ValueError, match=r"(?s)Listed\.strategy .* problem 'p\\x1b\[2J' .*; return a string"):
        cluster(ExactJudge(Listed()), ["a b"], problem)


@pytest.mark.parametrize("shared", [True, False], ids=["one object", "separate objects"])
@pytest.mark.parametrize("wrap", [lambda nan: nan, lambda nan: ("a", (nan,)), lambda nan: frozenset([nan])])
def test_a_strategy_with_nan_is_a_failure_of_the_judge(wrap: Callable[[float], Any], shared: bool):
    class Numbers(FirstWord):
        def strategy(self, problem, generation):
            return wrap(math.nan if shared else float("nan")) if generation.text == "nan" else float(generation.text)

    task, texts = Numbers(), ["4", "nan", "4", "nan"]
    with pytest.raises(ValueError, match=r"^The key .*nan.* contains NaN, .*; use None for a degenerate response"):
        cluster(ExactJudge(task), texts)

    async def groups() -> AsyncIterator[Group]:
        yield group(texts)

    (graded,) = asyncio.run(grade_groups(groups(), [PROBLEM], task, ExactJudge(task)))
    assert isinstance(graded.clustering, JudgeFailure) and "NaN" in graded.clustering.reason


def test_responses_share_a_cluster_if_and_only_if_they_share_a_strategy():
    rng = np.random.default_rng(0)
    task = MultiplicationTask()
    problem = Problem(id="", prompt="7*24:", answer="7,24")
    strategy_by_hand = {
        "7*(20+4)=140+28=168": "tens of 24",
        "7*(4+20)=28+140=168": "tens of 24",
        "7*(20+4)=1+1=1": "tens of 24",
        "7*(6*4)=42*4=168": "factors of 24",
        "24*(5+2)=1+1=2": "split of 7",
        "7*(20+": "none",
        "": "none",
    }
    texts = rng.choice(list(strategy_by_hand), size=40).tolist()
    clusters = cluster(ExactJudge(task), texts, problem)
    by_hand = np.array([strategy_by_hand[text] for text in texts])
    np.testing.assert_array_equal(clusters[:, None] == clusters[None], by_hand[:, None] == by_hand[None])
    np.testing.assert_array_equal(clusters == DEGENERATE_CLUSTER, by_hand == "none")


def test_incorrect_answers_are_distinct_clusters_in_polynomial_solving():
    texts = ["(x=0,y=5)", "(x=0,y=6)", "(x=1,y=6)", "(x=0,y=05)", "(x=0,y=5)"]
    np.testing.assert_array_equal(cluster(ExactJudge(PolynomialTask()), texts), [0, 1, 2, 100, 0])


def test_a_task_without_strategies_is_rejected():
    with pytest.raises(ConfigError, match=r"judge\.name='exact' .*strategy.* NoStrategies.* llm, ngrams, none"):
        make_judge(JudgeSection(name="exact"), NoStrategies())
