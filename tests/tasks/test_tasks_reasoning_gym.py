"""Tests of the task reasoning_gym: rewards of the package's own scorers, answers, problem splits and error messages."""

import asyncio
import base64
import importlib.util
import json
import os
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
from responses import response

from poly_epo_jax.config import default
from poly_epo_jax.config.keys import ConfigError, TaskSection
from poly_epo_jax.evaluate.benchmarks import open_benchmark
from poly_epo_jax.judges.answer import AnswerJudge
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.tasks import ReasoningGymTask
from poly_epo_jax.tasks.reasoning_gym import last_tagged
from poly_epo_jax.tasks.worker import grade
from poly_epo_jax.types import DEGENERATE_CLUSTER, Group, HasAnswers, PartialCredit, Problem

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None and not os.environ.get("POLY_EPO_REQUIRE_REASONING_GYM"),
    reason="requires the extra reasoning-gym, which `launch/test.sh all` installs",
)

WRONG = {
    "countdown": ["", "1 + 1", "7 / 0", "no expression"],
    "isomorphic_strings": ["true", "False", "maybe"],
    "list_functions": ["[]", "[1, 2]", "no list"],
    "mini_sudoku": ["1 2 3 4", "0", "\n".join(["1 2 3 4"] * 4)],
    "prime_factorization": ["2 \u00d7 2", "1 \u00d7 7", "two", "[[1]]"],
}
"""Datasets, and answers that are wrong, partially correct, or make the scorer raise an exception."""


def make_task(name: str, **options) -> ReasoningGymTask:
    defaults: dict[str, Any] = {"num_train": 20, "num_held_out": 5, "num_workers": 1}
    return ReasoningGymTask(dataset=name, **defaults | options)


def tagged(answer: str):
    return response(f"First a guess, <answer>0</answer>. Then I am sure: <answer> {answer}\n</answer>")


def package_score(name: str, entry: dict, answer: str) -> float:
    """Returns the score of the package in this process. Its scorers raise exceptions for some incorrect answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib, if it is compiled by this import
        from reasoning_gym.factory import get_score_answer_fn  # pyright: ignore[reportMissingImports]
    try:
        return float(get_score_answer_fn(name)(answer, entry))
    except (ValueError, TypeError):
        return 0.0


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_rewards_are_the_scores_of_the_package(name: str):
    task, seen = make_task(name, cpu_seconds=60.0), set()
    assert isinstance(task, HasAnswers) and isinstance(task, PartialCredit) and task.correct_from == 1
    for problem in (*task.train_problems[:8], *task.held_out_problems):
        entry = pickle.loads(base64.b64decode(task._entries[problem.id]))
        assert entry["question"] in problem.prompt and problem.chat and entry["answer"] == problem.answer
        for answer in (problem.answer, *WRONG[name]):
            score = package_score(name, entry, answer) if answer else 0.0
            task.raw_score = False
            assert task.reward(problem, tagged(answer)) == float(score >= 1), (problem.prompt, answer)
            task.raw_score = True
            assert task.reward(problem, tagged(answer)) == score
            seen.add(score)
        assert task.reward(problem, response(problem.answer)) == 0, "an answer without tags"
    assert {0.0, 1.0} <= seen
    assert len(seen) > 2 or name not in ("countdown", "prime_factorization"), "scores of incorrect answers"
    assert task.metrics() == {"grader/timeouts": 0, "grader/crashes": 0}
    task.close()
    if name == "countdown":
        task = make_task(name, cpu_seconds=1.0)
        assert task.reward(task.train_problems[0], tagged("9**9**9**9")) == 0
        assert task.metrics() == {"grader/timeouts": 1, "grader/crashes": 0}
        task.close()


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize("name", ["isomorphic_strings", "list_functions"])
def test_problems_are_the_same_in_all_processes(name: str, monkeypatch: pytest.MonkeyPatch):
    """These datasets depend on the hash seed of the process, or draw from the unseeded global generator."""
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    first = make_task(name, num_train=100)
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    second = make_task(name, num_train=50, num_held_out=10)
    assert first.train_problems[: len(second.train_problems)] == second.train_problems
    assert first.held_out_problems == second.held_out_problems[: len(first.held_out_problems)]
    assert len(first.train_problems) == 100 - sum(vars(first.dropped["train"]).values()) > 80


@needs_package
@pytest.mark.slow
def test_repeated_problems_are_removed_and_counted():
    task, other = (make_task("tower_of_hanoi", num_train=300, num_held_out=30, seed=seed) for seed in (0, 1))
    prompts = [problem.prompt for problem in (*task.train_problems, *task.held_out_problems)]
    assert len(prompts) == len(set(prompts))
    dropped = task.dropped["train"]
    assert dropped.duplicates > 100 and dropped.held_out > 0 and dropped.conflicting == 0
    assert len(task.train_problems) == 300 - dropped.duplicates - dropped.held_out
    assert [one.prompt for one in other.held_out_problems] != [one.prompt for one in task.held_out_problems]


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cuntdown", {}, "dataset='cuntdown'.* similar names are countdown"),
        ("countdown", {"min_number": 3}, "unexpected keyword argument 'min_number'"),
        ("countdown", {"min_target": 10**9, "max_target": 10**9}, "Failed to generate valid expression"),
    ],
)
def test_unknown_datasets_and_options(name: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_task(name, dataset_options=options, num_train=2, num_held_out=0)


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install .*\[reasoning-gym\]' .* C compiler"):
        make_task("countdown")


def test_one_line_selects_the_dataset():
    config = default.get_config("grpo")
    config.task.name, config.judge.name = "reasoning_gym", "answer"
    config.task.options = {"dataset": "countdown", "dataset_options": {"operators": ("+", "-")}}
    options = read_config(config).task.options
    assert json.dumps(options) == '{"dataset": "countdown", "dataset_options": {"operators": ["+", "-"]}}'
    config.task.options = {"seed": 1}
    with pytest.raises(ConfigError, match="lacks 'dataset'"):
        read_config(config)


def test_a_benchmark_whose_task_lacks_an_option_is_rejected():
    with pytest.raises(ConfigError, match=r"lacks 'dataset', which reasoning_gym requires"):
        open_benchmark("reasoning_gym", TaskSection(name="polynomial"))


@pytest.mark.parametrize(
    ("text", "answer"),
    {
        "<answer>3</answer>": "3",
        "<think>not <answer>4</answer></think>\n<answer>\n1 2\n3 4\n</answer> done.": "1 2\n3 4",
        "between <answer> and </answer>, so <answer>5</answer>": "5",
        "<answer>1 <answer>2</answer>": "2",
        "<answer>2</answer> or <answer>3": "2",
        "<answer> </answer>": None,
        "<answer>3": None,
        "3</answer>": None,
        "": None,
    }.items(),
)
def test_the_answer_is_the_text_in_the_last_pair_of_tags(text: str, answer: str | None):
    assert last_tagged(text) == answer


def test_responses_with_equal_answers_are_one_cluster():
    task = object.__new__(ReasoningGymTask)  # clusters do not depend on the dataset
    task.train_problems = task.held_out_problems = ()
    generations = (*map(tagged, ("1+2", "2+1", " 1+2 ")), response("1+2"))
    group = Group(Problem("p", "", "1+2"), np.zeros(1, np.int32), generations)
    clustering = asyncio.run(AnswerJudge(task).cluster(group))
    assert clustering.ids.tolist() == [0, 1, 0, DEGENERATE_CLUSTER]


def test_exceptions_of_a_grader_are_wrong_answers():
    def out_of_memory():
        raise MemoryError

    assert grade(lambda: 0.5, [], 1.0) == 0.5
    assert grade(lambda: 1 / 0, [], 1.0) == "wrong"
    with pytest.raises(MemoryError):
        grade(out_of_memory, [], 1.0)
