"""Tests of rewards with several parts: their weighted mean, the interface of TRL, concurrency, failures and records."""

import asyncio
import dataclasses
import math
import re
import threading
from collections.abc import AsyncIterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import LETTERS, PATIENCE, PROBLEMS, ByLetter, LetterJudge, group, unchecked
from simulated_time import SimulatedTime
from tiny_training import train_tiny

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.config.keys import TaskSection
from poly_epo_jax.records.run_folder import GENERATIONS, METRICS, read_rows
from poly_epo_jax.report.figures import plot_training_dynamics
from poly_epo_jax.rollouts import grading, rewards
from poly_epo_jax.rollouts.grading import grade_groups
from poly_epo_jax.rollouts.rewards import reward_parts
from poly_epo_jax.startup.read_config import make_task
from poly_epo_jax.system.daemon_thread import ThreadError
from poly_epo_jax.system.pending_calls import MAX_SHOWN, pending_calls
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.types import GradedGroup, Problem, Reward


class Parts(ByLetter):
    """A task with given rewards."""

    def __init__(self, *rewards: Any):
        self.rewards = list(rewards)


def graded(task: Any, texts: str = "abcd", problem: Problem = PROBLEMS[0]) -> GradedGroup:
    async def stream() -> AsyncIterator[Any]:
        yield group(problem, texts)

    grading = grade_groups(stream(), [problem], task, LetterJudge())
    return asyncio.run(asyncio.wait_for(grading, PATIENCE))[0]


def by_letter(values: Sequence[float | None]) -> Any:
    """Returns a reward function with a value for each letter."""

    def letters(completions: list[str], **columns: Any) -> list[float | None]:
        return [values[LETTERS.index(text)] for text in completions]

    return letters


def test_the_reward_is_the_weighted_mean_of_the_parts_that_are_not_none():
    rng = np.random.default_rng(0)
    for _ in range(50):
        weights = [0.0, *rng.choice([0.25, 1.0, 3.0], 2).tolist()]
        ranges = [(0.0, 1.0), (-1.0, 1.0), (2.0, 10.0)]
        values: list[list[float | None]] = [rng.uniform(low, high, 4).tolist() for low, high in ranges]
        for part, letter in zip(rng.integers(0, 3, 4), range(4), strict=True):  # at most one part of a response is None
            values[part][letter] = None
        parts = [
            Reward(by_letter(of_part), weight, between, f"part{i}")
            for i, (of_part, weight, between) in enumerate(zip(values, weights, ranges, strict=True))
        ]
        found = graded(Parts(*parts))
        for letter in range(4):
            total = weight_sum = Fraction(0)
            for part, weight, (low, high) in zip(values, map(Fraction, weights), ranges, strict=True):
                if (value := part[letter]) is not None:
                    total += weight * (Fraction(value) - Fraction(low)) / (Fraction(high) - Fraction(low))
                    weight_sum += weight
            assert found.rewards[letter] == pytest.approx(float(total / weight_sum), abs=1e-6)
        for i, (of_part, (low, high)) in enumerate(zip(values, ranges, strict=True)):
            expected = [math.nan if value is None else (value - low) / (high - low) for value in of_part]
            np.testing.assert_allclose(found.parts[f"part{i}"], expected, atol=1e-6)


def format_reward_func(completions, **kwargs):
    """A reward function for conversational data, as users of TRL write it."""
    return [1.0 if re.fullmatch("[ab]", completion[0]["content"]) else 0.0 for completion in completions]


def test_a_reward_function_of_trl_is_called_as_trl_calls_it():
    """A single function is sufficient. Problems in chat format have messages, and other problems texts."""
    received = []

    def recorded(prompts, completions, completion_ids, solution, answer, **kwargs):
        received.append((prompts, completions, completion_ids, solution, answer, kwargs.keys()))
        return [float(text == right) for text, right in zip(completions, solution, strict=True)]

    problem = dataclasses.replace(PROBLEMS[0], columns={"solution": "b", "difficulty": 3})
    task: Any = Parts()
    task.rewards = recorded
    assert graded(task, "ab", problem).rewards.tolist() == [0, 1]
    shared = ["b"], ["a"], {"difficulty", "problems", "generations"}
    assert sorted(received) == [(["p:"], [text], [[ids, 1]], *shared) for text, ids in (("a", 2), ("b", 3))]
    chat = dataclasses.replace(PROBLEMS[0], chat=True, system="Be brief.")
    assert graded(Parts(format_reward_func), "abc", chat).rewards.tolist() == [1, 1, 0]

    def has_messages(prompts: Any, **columns: Any) -> list[float]:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "p:"}]
        return [float(prompts == [messages])]

    assert graded(Parts(has_messages), "a", chat).rewards.tolist() == [1]


def test_a_class_can_be_a_reward():
    class Sparse:
        async def __call__(self, problems: list[Problem], generations: list[Any], **columns: Any) -> list[float]:
            return [ByLetter().reward(*pair) for pair in zip(problems, generations, strict=True)]

    found = graded(Parts(Sparse()), "ab")
    assert found.rewards.tolist() == found.parts["Sparse"].tolist() == [1, 0]


def test_threads_of_rewards_are_limited_and_time_limits_start_with_them(monkeypatch: pytest.MonkeyPatch):
    running, counts, pending = set[object](), list[int](), list[str]()

    async def in_daemon_thread(function: Any) -> Any:
        running.add(call := object())
        for _ in range(10):  # until all other calls have started, unless they wait
            await asyncio.sleep(0)
        counts.append(len(running))
        pending.append(pending_calls()[0])
        running.remove(call)
        return function()

    monkeypatch.setattr(rewards, "in_daemon_thread", in_daemon_thread)
    monkeypatch.setattr(rewards, "MAX_CALLS", MAX_SHOWN)
    parts = Parts(by_letter([1, 1, 1, 1]), Reward(by_letter([0, 0, 0, 0]), name="second"))
    assert graded(parts).rewards.tolist() == [0.5] * 4
    assert len(counts) == 8 and max(counts) == MAX_SHOWN
    assert not any("more" in text for text in pending)  # a call is pending while its time limit runs


@pytest.mark.parametrize("task", [ByLetter(), Parts(by_letter([1, 1, 1, 1]))], ids=["reward", "rewards"])
def test_a_thread_that_does_not_start_is_not_a_failure_of_the_reward(task: Any, monkeypatch: pytest.MonkeyPatch):
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ThreadError, match=r"^Failed to start a thread: can't start new thread\. Increase .*ulimit"):
        graded(task)


def test_asynchronous_rewards_of_all_responses_are_awaited_together(monkeypatch: pytest.MonkeyPatch):
    """Each call waits until all calls have started. The barrier belongs to one event loop, as clients of servers do."""
    monkeypatch.setattr(rewards, "MAX_CALLS", 1)
    barrier = asyncio.Barrier(8)

    async def first(completions: list[str], **columns: Any) -> list[float]:
        await barrier.wait()
        return [0.0]

    async def second(completions: list[str], **columns: Any) -> list[float]:
        await barrier.wait()
        return [1.0]

    for _ in range(2):
        assert graded(Parts(first, second)).rewards.tolist() == [0.5] * 4


def raising(completions: list[str], **columns: Any) -> list[float]:
    return [1 / (completions[0] != "b")]


async def raising_later(completions: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return raising(completions)


@pytest.mark.parametrize("function", [raising, raising_later])
def test_a_part_that_raises_masks_its_response(function: Any):
    one = graded(Parts(by_letter([1, 1, 1, 1]), Reward(function, name="mine")))
    ((index, failure),) = one.group.failures.items()
    assert (index, failure.kind) == (1, "raised")
    assert one.rewards.tolist() == one.parts["mine"].tolist() == [1.0, 1.0, 1.0]
    line = raising.__code__.co_firstlineno + 1
    part = re.escape("Parts.rewards['mine'] raised ZeroDivisionError for problem 'p' at ")
    assert re.match(rf"{part}.*test_rewards\.py:{line}: ", failure.reason), failure.reason


def test_a_response_without_any_part_is_a_failure_of_the_reward():
    logged = Reward(by_letter([1, 1, 1, 1]), weight=0, name="logged")
    task = Parts(by_letter([1, None, 1, 1]), logged)
    assert graded(task, "ac").rewards.tolist() == [1, 1]
    failure = graded(task, "ab").group.failures[1]
    assert failure.kind == "raised" and "for problem 'p': all rewards" in failure.reason


def test_errors_that_an_event_loop_cannot_raise_are_failures():
    for error in (SystemExit, KeyboardInterrupt, asyncio.CancelledError):

        async def broken(error: type[BaseException] = error, **columns: Any) -> list[float]:
            raise error("in the reward")

        failures = graded(Parts(broken)).group.failures
        assert len(failures) == 4 and all(error.__name__ in failure.reason for failure in failures.values())


def test_an_asynchronous_reward_that_hangs_is_cancelled(monkeypatch: pytest.MonkeyPatch):
    time, cancelled = SimulatedTime(monkeypatch, grading), threading.Event()

    async def hanging(**columns: Any) -> list[float]:
        try:
            time.expire()
            await asyncio.Event().wait()
            raise AssertionError
        finally:
            cancelled.set()

    assert graded(Parts(hanging), "a").group.failures[0].kind == "late" and cancelled.wait(PATIENCE)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (1.0, "1.0 (float)"),
        (np.float32(1.0), "(float32)"),
        ([[1.0]], "[[1.0]] (list)"),
        (None, "None (NoneType)"),
        ([], "[] (list)"),
        ([1.0, 1.0], "[1.0, 1.0] (list)"),
        ("1", "'1' (str)"),
        (["1"], "['1'] (list)"),
        ([True], "[True] (list)"),
        ([math.nan], "[nan] (list)"),
        ([1.5], "[1.5] (list)"),
        ([-0.5], "[-0.5] (list)"),
        ([10**400], "(list)"),
    ],
    ids=repr,
)
def test_invalid_values_are_rejected_with_the_part_and_the_problem(returned: Any, text: str):
    with pytest.raises(ValueError, match=r"^Parts\.rewards\['mine'\] .* for problem 'p', .* from 0 to 1, ") as error:
        graded(Parts(Reward(lambda **columns: returned, name="mine")))
    assert text in str(error.value)


def test_values_may_exceed_the_range_by_a_rounding_error():
    parts = Parts(Reward(lambda **columns: np.array([-0.3], np.float32), range=(-0.3, 0.0), name="float32"))
    assert graded(parts, "a").rewards.tolist() == [0]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([raising, raising], "unique"),
        ([lambda **columns: [1.0]], "name="),
        ([unchecked(Reward, function="accuracy", name="")], "not a function"),
        ([Reward(raising, weight=-1)], "weight is -1"),
        ([unchecked(Reward, function=raising, weight="1", range=(0, 1), name="")], "weight is '1'"),
        ([Reward(raising, weight=math.inf)], "weight is inf"),
        ([Reward(raising, weight=0)], "above 0"),
        ([], "above 0"),
        ([Reward(raising, range=(1, 0))], r"range is \(1, 0\)"),
        ([Reward(raising, range=(0, math.inf))], "range is"),
    ],
)
def test_invalid_parts_are_rejected_at_the_start(parts: Any, text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(TASKS, "parts", lambda: Parts(*parts))
    with pytest.raises(ConfigError, match=rf"^Parts\.rewards.*{text}"):
        make_task(TaskSection(name="parts", options={}))


def test_rewards_of_episodes_are_rejected(monkeypatch: pytest.MonkeyPatch):
    class Both(Parts):
        def start(self, problem: Problem, seed: int) -> Any:
            raise NotImplementedError

    monkeypatch.setitem(TASKS, "both", lambda: Both(raising))
    with pytest.raises(ConfigError, match="remove rewards or the method start"):
        make_task(TaskSection(name="both", options={}))


def test_the_parts_are_logged_stored_and_drawn(tmp_path: Path):
    task: Any = Parts(
        Reward(by_letter([1, 0, 0, 1]), name="right"), Reward(by_letter([-1, None, 1, 0]), 0.5, (-1, 1), "tone")
    )
    assert [part.name for part in reward_parts(task)] == ["right", "tone"]
    train_tiny(tmp_path / "run", task=task)
    rows = read_rows(tmp_path / "run" / GENERATIONS)
    stored = {"a": {"right": 1, "tone": 0}, "b": {"right": 0, "tone": None}}
    stored |= {"c": {"right": 0, "tone": 1}, "d": {"right": 1, "tone": 0.5}}
    assert rows and all(row["rewards"] == stored[row["response"]] for row in rows)
    metrics = read_rows(tmp_path / "run" / METRICS)
    for step in (1, 2):
        (found,) = [row for row in metrics if row["step"] == step and "reward" in row]
        of_step = [row["rewards"] for row in rows if row["step"] == step]
        for name in ("right", "tone"):
            present = [parts[name] for parts in of_step if parts[name] is not None]
            assert found[f"rewards/{name}"] == pytest.approx(np.mean(present))
    assert all(0 <= row["eval/rewards/tone"] <= 1 for row in metrics if "eval/reward" in row)
    figure = plot_training_dynamics({"run": metrics})
    assert figure is not None
    assert {"Reward part right", "Reward part tone"} <= {axes.get_title("left") for axes in figure.axes}
