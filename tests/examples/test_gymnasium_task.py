"""Tests of examples/gymnasium_task.py, whose environments run in a worker process."""

import asyncio
import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from extending import ROOT
from fakes import PATIENCE
from responses import response

from poly_epo_jax.rollouts.environments import Environments
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.types import Generation, Outcome

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="requires gymnasium==1.4.0"),
]

WORDS = '''
import string

import gymnasium


class Words(gymnasium.Env):
    """A word is spelled letter by letter. The reward of each letter is its fraction of the word."""

    observation_space = action_space = gymnasium.spaces.Text(20, charset=string.ascii_lowercase)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word, self.number = self.np_random.choice(["tree", "lake"]), 0
        return self.word, {}

    def step(self, action):
        reward = (action == self.word[self.number]) / len(self.word)
        self.number += 1
        return self.word[self.number :], reward, self.number == len(self.word), False, {}


gymnasium.register("Words-v0", Words)
'''


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT / "examples")
    yield importlib.import_module("gymnasium_task")
    TASKS.pop("gymnasium", None)
    sys.modules.pop("gymnasium_task", None)


def play(task: Any, *turns: str) -> Generation:
    """Plays an episode in which the policy takes the given turns, in a worker process."""

    async def take_turn(before: Generation, reply: str) -> Generation:
        return dataclasses.replace(before, turns=(*before.turns, reply, turns[len(before.turns) // 2 + 1]))

    first = dataclasses.replace(response(""), turns=turns[:1])
    played = asyncio.run(Environments(task, PATIENCE, 1).play(task.train_problems[0], 0, first, take_turn))
    assert isinstance(played, Generation), played
    return played


def test_moves_on_a_frozen_lake(example: Any):
    task = example.GymnasiumTask(settings={"is_slippery": False}, num_train=2, num_held_out=1)
    assert len(task.train_problems) == 2 and "row 0 and column 0" in task.train_problems[0].prompt
    moves = ("down", "down", "right", "right", "down", "right")
    played = play(task, "<think>\n?\n</think>\n\ndown", "north", *moves[1:])
    assert ["row 1 and column 0" in played.turns[1], "not an action" in played.turns[3]] == [True, True]
    assert played.outcome == Outcome(1.0, moves, metrics={"actions": 6.0, "invalid_actions": 1.0})
    lost = play(task, "right", "down")
    assert lost.outcome and (lost.outcome.reward, lost.outcome.strategy) == (0.0, ("right", "down"))


def test_an_environment_of_texts(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_words.py").write_text(WORDS)
    monkeypatch.syspath_prepend(tmp_path)
    task = example.GymnasiumTask("own_words:Words-v0", num_train=8, num_held_out=0)
    assert {problem.prompt for problem in task.train_problems} == {"tree", "lake"}
    word = task.train_problems[0].prompt
    played = play(task, *word[:3], "z")
    assert played.turns[1::2] == (word[1:], word[2:], word[3:])
    assert played.outcome and played.outcome.reward == 0.75
