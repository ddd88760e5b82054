"""Tests of the task guess_number: problems, episodes and demonstrations."""

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
from responses import response

from poly_epo_jax.tasks import TASKS, DemonstrationStyle, GuessNumberTask
from poly_epo_jax.types import Interactive, Outcome, Problem


def small_task(**options: Any) -> GuessNumberTask:
    small: dict[str, Any] = {"smallest": 8, "largest": 9, "num_train": 200, "num_held_out": 50, "num_demonstrated": 500}
    return GuessNumberTask(**small | options)


def played(task: GuessNumberTask, problem: Problem, *turns: str) -> tuple[list[str | None], Outcome]:
    """Returns the replies to turns, up to the end of the episode, and the outcome."""

    async def play() -> tuple[list[str | None], Outcome]:
        episode, replies = task.start(problem, seed=0), []
        for turn in turns:
            replies.append(await episode.reply(dataclasses.replace(response(""), turns=("ignored", "<", turn))))
            if replies[-1] is None:
                break
        return replies, await episode.close()

    return asyncio.run(play())


def test_default_problems():
    task = TASKS["guess_number"]()
    assert isinstance(task, GuessNumberTask) and isinstance(task, Interactive)
    for problem in (*task.train_problems, *task.held_out_problems):
        low, high = map(int, problem.prompt.split("-"))
        assert 10 <= low <= int(problem.answer) <= high <= 99 and 20 <= high - low + 1 <= 60
        assert set(problem.prompt) <= set(task.alphabet)
    parts = (task.train_problems, task.held_out_problems, task.demonstrated_problems)
    assert len({problem.id for part in parts for problem in part}) == sum(map(len, parts)) == 23_200


def test_binary_search_finds_as_many_numbers_as_any_strategy_can():
    """A strategy with g guesses distinguishes at most 2^g - 1 numbers."""
    task = small_task()

    def search(problem: Problem) -> Outcome:
        low, high = map(int, problem.prompt.split("-"))
        turns = []
        while True:
            turns.append(str((low + high) // 2))
            replies, outcome = played(task, problem, *turns)
            if replies[-1] is None:
                return outcome
            low, high = (low, int(turns[-1]) - 1) if replies[-1] == "<" else (int(turns[-1]) + 1, high)

    for size, won in ((8, 8), (9, 9)):
        problems = [task.problem((20, 19 + size, secret)) for secret in range(20, 20 + size)]
        assert sum(search(problem).reward for problem in problems) == won
    three = small_task(guesses=3)
    task = three
    assert sum(search(three.problem((20, 28, secret))).reward for secret in range(20, 29)) == 7


def test_replies_and_outcomes():
    task = small_task(guesses=3)
    problem = task.problem((20, 28, 24))
    replies, outcome = played(task, problem, "26", "21", "24")
    assert replies == ["<", ">", None]
    assert outcome == Outcome(1.0, 26, True, {"guesses": 3.0, "malformed": 0.0})
    assert played(task, problem, "26", "21", "25") == (
        ["<", ">", None],
        dataclasses.replace(outcome, reward=0.0, correct=False),
    )
    assert played(task, problem, "24", "25")[0] == [None]
    assert played(task, problem)[1] == Outcome(0.0, None, False, {"guesses": 0.0, "malformed": 0.0})
    for turn in ("", "2", "024", "24 ", "-2", "2<", "٢٤", "24\n"):
        replies, outcome = played(task, problem, "26", turn, "24")
        assert replies == ["<", None] and outcome.reward == 0 and outcome.strategy == 26
        assert outcome.metrics == {"guesses": 1.0, "malformed": 1.0}
        assert played(task, problem, turn)[1].strategy is None


def test_demonstrations_are_episodes_that_use_all_hints():
    task, rng = small_task(smallest=20, largest=40), np.random.default_rng(0)
    wins, mistakes, first = [], 0, {skew: [] for skew in (0.0, 2.0)}
    for problem in task.demonstrated_problems:
        low, high = map(int, problem.prompt.split("-"))
        for skew in first:
            turns = task.demonstration(problem, rng, DemonstrationStyle(0.0, skew))
            replies, outcome = played(task, problem, *turns[::2])
            assert turns[1::2] == tuple(reply for reply in replies if reply) and replies[-1] is None
            assert set("".join(turns)) <= set(task.alphabet)
            possible = range(low, high + 1)
            for guess, reply in zip(map(int, turns[::2]), replies, strict=True):
                assert guess in possible
                possible = range(possible.start, guess) if reply == "<" else range(guess + 1, possible.stop)
            first[skew].append((int(turns[0]) - low) / (high - low))
            wins.append(outcome.reward)
        turns = task.demonstration(problem, rng, DemonstrationStyle(1.0, 0.0))
        mistakes += len(set(turns[::2])) < len(turns[::2])
    assert 0.2 < np.mean(wins) < 0.5 and mistakes
    assert (
        np.mean(np.abs(np.array(first[2.0]) - 0.5) < 0.11)
        > 0.8
        > 0.3
        > np.mean(np.abs(np.array(first[0.0]) - 0.5) < 0.11)
    )


def test_invalid_options():
    with pytest.raises(ValueError, match="smallest=30"):
        small_task(smallest=30)
    with pytest.raises(ValueError, match="num_train"):
        small_task(num_train=10**6)
