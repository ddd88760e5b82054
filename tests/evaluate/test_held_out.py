"""Tests of held-out metrics against enumeration of all k-subsets of the generations."""

import asyncio
import contextlib
import dataclasses
import itertools
import signal
import threading
from collections.abc import AsyncGenerator, Hashable, Sequence

import numpy as np
import pytest
from fakes import PATIENCE, Scripted

from poly_epo_jax.evaluate import held_out
from poly_epo_jax.evaluate.held_out import evaluate_held_out
from poly_epo_jax.judges.exact import ExactJudge
from poly_epo_jax.metrics import evaluation
from poly_epo_jax.metrics.evaluation import EVALUATION_METRICS, EvaluationMetric
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.system.signals import Stopped, StopSignal
from poly_epo_jax.types import (
    Clustering,
    Completion,
    Generation,
    Group,
    JudgeFailure,
    Params,
    Problem,
    Request,
    Sampling,
    Strategic,
)

SAMPLING = Sampling(max_tokens=1)
TIMEOUT_SECONDS = 123.0
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789?"


class Letters:
    """A response is the letter of its strategy followed by its reward in tenths. "?" stands for no strategy."""

    train_problems: Sequence[Problem] = ()
    held_out_problems: Sequence[Problem] = ()

    def reward(self, problem: Problem, generation: Generation) -> float:
        return int(generation.text[1:]) / 10

    def strategy(self, problem: Problem, generation: Generation) -> Hashable | None:
        return None if generation.text[0] == "?" else generation.text[0]


class Recorded(Scripted):
    """Returns predefined responses, with prompts in reverse order."""

    def __init__(self, responses: dict[str, list[str]]):
        super().__init__(lambda request, index: responses[request.problem_id][index], ALPHABET)
        self.calls: list[tuple] = []

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        self.calls.append((len(requests), {len(request.seeds) for request in requests}, sampling))
        for index in reversed(range(len(requests))):
            async for completion in super().sample(requests[index : index + 1], sampling):
                yield dataclasses.replace(completion, request=index)

    async def push_weights(self, params: Params, version: int) -> None:
        raise AssertionError("an evaluation must not push weights")


class Unreliable:
    """The exact judge, but with failures on the given problems."""

    def __init__(self, task: Strategic, failing: Sequence[str]):
        self.exact, self.failing = ExactJudge(task), failing

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        return (
            JudgeFailure("broken", "out of order")
            if group.problem.id in self.failing
            else await self.exact.cluster(group)
        )


def evaluate(
    responses: dict[str, list[str]], failing: Sequence[str] = (), stop: StopSignal | None = None
) -> dict[str, float]:
    task, sampler = Letters(), Recorded(responses)
    rollouts = Rollouts(sampler, sampler.tokenizer, task, max_prompt_tokens=8, grading_timeout_seconds=TIMEOUT_SECONDS)
    problems = [Problem(id, id, id) for id in responses]
    num_generations = len(next(iter(responses.values())))
    judge = Unreliable(task, failing)

    async def work() -> dict[str, float]:
        with stop.on_signals() if stop else contextlib.nullcontext():
            return await evaluate_held_out(rollouts, task, judge, problems, num_generations, SAMPLING, stop)

    metrics = asyncio.run(work())
    assert sampler.calls == [(len(problems), {num_generations}, SAMPLING)]
    return metrics


def test_replaced_characters_of_an_evaluation_are_not_counted_in_training_steps():
    task, sampler = Letters(), Scripted(lambda request, index: "a10", ALPHABET + "\ufffd")
    rollouts = Rollouts(sampler, sampler.tokenizer, task, max_prompt_tokens=8)
    train, test = Problem("p", "a\ud800", ""), Problem("q", "a\ud800\udfff\ud800", "")

    async def work() -> tuple[dict[str, float], dict[str, float]]:
        await anext(rollouts.generate([train], 1, SAMPLING))  # a batch that is generated ahead
        metrics = await evaluate_held_out(rollouts, task, ExactJudge(task), [test], 2, SAMPLING)
        return metrics, rollouts.metrics()

    evaluated, trained = asyncio.run(work())
    assert evaluated["eval/rollouts/replaced_characters"] == 3.0
    assert trained == {"rollouts/replaced_characters": 1.0}


def over_subsets(texts: list[str], k: int, worth) -> float:
    return float(np.mean([worth(subset) for subset in itertools.combinations(texts, k)]))


def distinct(texts: Sequence[str], is_correct: bool) -> int:
    return len({text[0] for text in texts if text[0] != "?" and (text[1:] == "10") == is_correct})


RESPONSES = {
    "mixed": ["a10", "a10", "b10", "c0", "c0", "?0"],
    "none": ["a0", "b0", "c0", "d5", "?0", "?0"],
    "all": ["a10", "a10", "a10", "a10", "a10", "a10"],
    "partly": ["a10", "a5", "a9", "b10", "b0", "?10"],
}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_metrics_are_means_over_all_subsets(size: int):
    responses = {name: texts[-size:] for name, texts in RESPONSES.items()}
    everything = list(itertools.chain(*responses.values()))
    expected = {
        "eval/reward": np.mean([int(text[1:]) / 10 for text in everything]),
        "eval/solved": np.mean([any(text[1:] == "10" for text in texts) for texts in responses.values()]),
        **{
            f"eval/cover@{tau}": np.mean([sum(t[1:] == "10" for t in ts) / size >= tau for ts in responses.values()])
            for tau in (0.2, 0.5, 0.8)
        },
        "eval/degenerate_fraction": np.mean([text[0] == "?" for text in everything]),
        "eval/judge_failed_problems": 0,
    }
    is_graded = any(text[1:] not in ("0", "10") for text in everything)
    best = {"best_reward": lambda subset: max(int(text[1:]) / 10 for text in subset)} if is_graded else {}
    for k in [k for k in (1, 2, 4) if k <= size]:
        for name, worth in {
            **best,
            "pass": lambda subset: any(text[1:] == "10" for text in subset),
            "correct_clusters": lambda subset: distinct(subset, True),
            "incorrect_clusters": lambda subset: distinct(subset, False),
        }.items():
            expected[f"eval/{name}@{k}"] = np.mean([over_subsets(texts, k, worth) for texts in responses.values()])
    metrics = evaluate(responses)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name


def test_problem_without_clustering_counts_in_other_metrics():
    metrics, judged = evaluate(RESPONSES, failing=["mixed", "all"]), dict(RESPONSES)
    del judged["mixed"], judged["all"]
    whole, part = evaluate(RESPONSES), evaluate(judged)
    assert metrics["eval/judge_failed_problems"] == 2
    for name in metrics.keys() - {"eval/judge_failed_problems"}:
        expected = part if "clusters" in name or "degenerate" in name else whole
        assert metrics[name] == pytest.approx(expected[name]), name


@pytest.mark.parametrize("name", ["reward", "degenerate_fraction", "judge_failed_problems"])
def test_a_metric_with_the_name_of_another_metric_is_rejected(monkeypatch: pytest.MonkeyPatch, name: str):
    mine = EvaluationMetric(lambda rewards: rewards.mean(axis=1) + 1, "mine", "Mean reward plus 1.")
    monkeypatch.setattr(evaluation, "EVALUATION_METRICS", {**EVALUATION_METRICS, name: mine})
    with pytest.raises(ValueError, match=f"eval/{name} is the name of another metric; .* '{name}' under"):
        evaluate(RESPONSES)


def test_the_functions_of_metrics_have_the_time_limit_of_the_configuration(monkeypatch: pytest.MonkeyPatch):
    called = []

    def values(arrays: dict, reading: str = "", **options: object) -> dict[str, np.ndarray]:
        called.append((reading, options["timeout_seconds"]))
        return {}

    monkeypatch.setattr(held_out, "problem_values", values)
    evaluate(RESPONSES)
    assert called == [("", TIMEOUT_SECONDS), ("clusters", TIMEOUT_SECONDS)]


def test_a_stop_ends_the_wait_for_a_metric(monkeypatch: pytest.MonkeyPatch):
    event, stop = threading.Event(), StopSignal()

    def wait(rewards: np.ndarray) -> np.ndarray:
        stop.request(signal.SIGTERM)
        assert event.wait(PATIENCE)
        return rewards.mean(axis=1)

    monkeypatch.setattr(evaluation, "EVALUATION_METRICS", {"mine": EvaluationMetric(wait, "mine", "Waits.")})
    with pytest.raises(Stopped):
        evaluate(RESPONSES, stop=stop)
    event.set()


def test_no_cluster_metrics_without_clusterings():
    metrics = evaluate(RESPONSES, failing=list(RESPONSES))
    assert metrics["eval/judge_failed_problems"] == len(RESPONSES)
    assert metrics["eval/reward"] == evaluate(RESPONSES)["eval/reward"]
    assert not [name for name in metrics if "clusters" in name or "degenerate" in name]
