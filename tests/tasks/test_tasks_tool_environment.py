"""Tests of the task tool_environment: environments in the interface of TRL, their prompts, episodes and errors."""

import asyncio
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from extending import files_on
from fakes import PATIENCE
from responses import response
from transformers import AutoTokenizer

from poly_epo_jax.rollouts.between_turns import encode_between
from poly_epo_jax.rollouts.environments import Environments
from poly_epo_jax.rollouts.prompts import encode_prompts
from poly_epo_jax.tasks.tool_environment import CLUSTERS, ToolEnvironmentTask
from poly_epo_jax.types import EnvironmentFailure, Generation, Interactive, Outcome

MODULE = '''
import asyncio
import itertools

COUNTER = itertools.count()


class Number:
    """A number is found by comparisons. The policy can give up."""

    def reset(self, secret, prompt, text="", **kwargs):
        self.secret, self.reward, self.last = secret, 0.0, None
        return (" It is below 10." if text == "" else next(COUNTER) and text) or None

    @property
    def state(self):
        raise RuntimeError("properties are not evaluated")

    def compare(self, number: int) -> str:
        """Compares a number.

        Args:
            number: The number.
        """
        if number == 13:
            raise ConnectionError("no response")
        if number > 9:
            raise LookupError(f"{number} is too large")
        self.reward = float(number == self.secret)
        return self._hint(number)

    def _hint(self, number):
        return "found" if self.reward else "larger" if number < self.secret else "smaller"

    def get_reward(self):
        return self.reward


class Lamp:
    """A lamp with asynchronous methods, which must run in one event loop."""

    def __init__(self):
        self.is_on = False

    def reset(self, **kwargs):
        assert "environment" not in kwargs
        self.is_on = False

    async def switch(self, times: int = 1) -> bool:
        """Switches the lamp.

        Args:
            times: How often.
        """
        loop = asyncio.get_running_loop()
        self.loop = getattr(self, "loop", loop)
        assert self.loop is loop
        await asyncio.sleep(0)
        self.is_on ^= times % 2 == 1
        return self.is_on

    async def get_reward(self):
        return float(self.is_on)


class NoReward:
    def reset(self):
        return None


class NoText(Number):
    def undescribed(self, number):
        return number


ENVIRONMENTS = {"number": Number, "lamp": lambda: Lamp()}
'''
USER = {"role": "user", "content": "Find the number."}
Open = Callable[..., ToolEnvironmentTask]


@pytest.fixture
def open_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens a task with the environments of a new module and the given rows."""
    name = f"own_environments_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def open_with(*rows: dict[str, Any], factory: str = "Number", **options: Any) -> ToolEnvironmentTask:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return ToolEnvironmentTask(factory=f"{name}:{factory}", train=str(file), **options)

    return open_with


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def result(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


def play(task: Any, *turns: str, problem: int = 0, num_workers: int = 0) -> Generation | EnvironmentFailure:
    """Plays an episode in which the policy takes the given turns."""
    environments = Environments(task, PATIENCE, num_workers)

    async def take_turn(before: Generation, reply: str) -> Generation:
        return dataclasses.replace(before, turns=(*before.turns, reply, turns[len(before.turns) // 2 + 1]))

    first = dataclasses.replace(response(""), turns=turns[:1])
    return asyncio.run(environments.play(task.train_problems[problem], 0, first, take_turn))


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_episode(open_task: Open, num_workers: int):
    task = open_task({"prompt": [USER], "secret": 7}, {"prompt": "Find it.", "secret": 2, "answer": 2})
    assert isinstance(task, Interactive) and task.held_out_problems == ()
    assert [problem.prompt for problem in task.train_problems] == [
        "Find the number. It is below 10.",
        "Find it. It is below 10.",
    ]
    (tool,) = task.train_problems[0].tools
    assert tool["function"]["name"] == "compare"
    assert tool["function"]["parameters"]["properties"]["number"]["type"] == "integer"
    turns = call("compare", number=3), call("compare", number=12), call("compare", number=7), "It is 7."
    played = play(task, *turns, num_workers=num_workers)
    assert isinstance(played, Generation)
    assert played.turns[1::2] == (result("larger"), result("Error: 12 is too large"), result("found"))
    strategy = tuple(("compare", ("number", number)) for number in ("3", "7"))
    assert played.outcome == Outcome(1.0, strategy, metrics={"tool_calls": 2.0, "failed_tool_calls": 1.0})
    other = play(task, call("compare", number=7), "It is 7.", problem=1)
    assert isinstance(other, Generation) and other.outcome and other.outcome.reward == 0


def test_several_environments_some_of_which_are_asynchronous(open_task: Open):
    rows = {"prompt": "Find it.", "secret": 1, "environment": "number"}, {"environment": "lamp", "prompt": "Light!"}
    task = open_task(*rows, factory="ENVIRONMENTS", clusters="tools")
    number, lamp = task.train_problems
    assert [one.tools[0]["function"]["name"] for one in (number, lamp)] == ["compare", "switch"]
    assert lamp.prompt == "Light!"
    played = play(task, call("switch") + call("switch", times=2), call("switch", times=2), "On.", problem=1)
    assert isinstance(played, Generation) and played.outcome
    assert played.turns[1] == result("True") + "\n" + result("True")
    assert (played.outcome.reward, played.outcome.strategy) == (1.0, ("switch",) * 3)
    with pytest.raises(ValueError, match="number, lamp"):
        open_task({"prompt": "", "environment": "another"}, factory="ENVIRONMENTS")


def test_failures_of_the_environment_are_not_rewarded(open_task: Open):
    task = open_task({"prompt": "Find it.", "secret": 7})
    lost = play(task, call("compare", number=13), "It is 13.")
    assert isinstance(lost, EnvironmentFailure) and lost.kind == "raised" and "no response" in lost.reason
    changing = open_task({"prompt": "Find it.", "secret": 7, "text": "a"})  # returns another text at every reset
    changed = play(changing, call("compare", number=7), "It is 7.")
    assert isinstance(changed, EnvironmentFailure) and changed.kind == "failed" and "reset" in changed.reason


def test_an_episode_without_a_call(open_task: Open):
    played = play(open_task({"prompt": "Find it.", "secret": 7}), "It is 7.")
    assert isinstance(played, Generation) and played.outcome
    assert (played.outcome.reward, played.outcome.strategy, len(played.turns)) == (0.0, None, 1)


def test_the_environment_in_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_number.py").write_text(files_on("how_to/tools.md")["my_number.py"])
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Find the secret number.", "secret": 17}')
    monkeypatch.syspath_prepend(tmp_path)
    task = ToolEnvironmentTask(factory="my_number:NumberEnvironment", train=str(tmp_path / "rows.jsonl"))
    assert task.train_problems[0].prompt == "Find the secret number. It is between 1 and 100."
    played = play(task, call("compare", number=50), call("compare", number=17), "17")
    assert isinstance(played, Generation) and played.outcome and played.outcome.reward == 1
    assert played.turns[1::2] == (result("smaller"), result("equal"))


def test_strategies(open_task: Open):
    found = {}
    for clusters in CLUSTERS:
        task = open_task({"prompt": "Find it.", "secret": 7}, clusters=clusters)
        played = play(task, call("compare", number=1) + call("compare", number=2), "?")
        found[clusters] = isinstance(played, Generation) and played.outcome and played.outcome.strategy
    first, second = (("compare", ("number", number)) for number in "12")
    assert found == {"first_call": first, "calls": (first, second), "tools": ("compare", "compare")}


@pytest.mark.parametrize(
    ("factory", "row", "message"),
    [
        ("Missing", {}, "factory"),
        ("NoReward", {}, "get_reward"),
        ("NoText", {}, "undescribed"),
        ("Number", {"prompt": [USER, {"role": "assistant", "content": "Yes."}, USER]}, "user message"),
        ("Number", {"prompt": [{"role": "user", "content": [{"type": "text", "text": "?"}]}]}, "user message"),
    ],
)
def test_other_classes_and_rows_are_rejected(open_task: Open, factory: str, row: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        open_task({"prompt": "Find it.", "secret": 1} | row, factory=factory)


def test_prompts_and_replies_are_those_of_the_chat_template(open_task: Open):
    folder = os.environ.get("POLY_EPO_SHARED")
    if not folder:
        pytest.skip("needs the Qwen3 tokenizer in $POLY_EPO_SHARED/tokenizers/qwen3")
    tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "tokenizers" / "qwen3")
    system = {"role": "system", "content": "Be brief."}
    task = open_task({"prompt": [system, USER], "secret": 7})
    problem = task.train_problems[0]
    chat = [system, {"role": "user", "content": f"{USER['content']} It is below 10."}]

    def encoded(*further: dict[str, Any]) -> list[int]:
        options: dict[str, Any] = {"tools": [*problem.tools], "tokenize": False, "add_generation_prompt": True}
        return tokenizer(str(tokenizer.apply_chat_template([*chat, *further], **options)))["input_ids"]

    (prompt,) = encode_prompts(tokenizer, [problem], 200_000)
    assert prompt.tolist() == encoded()
    turn = call("compare", number=3) + "\n" + call("compare", number=8)
    played = play(task, turn, "It is 7.")
    assert isinstance(played, Generation)
    between = encode_between(tokenizer, played.turns[1], True, "<|im_end|>", 200_000).tolist()
    answer = tokenizer(f"{turn}<|im_end|>")["input_ids"]
    tools = [{"role": "tool", "content": text} for text in ("larger", "smaller")]
    thinking = tokenizer.decode(prompt).endswith("assistant\n")
    assert thinking and [*prompt, *answer, *between] == encoded({"role": "assistant", "content": turn}, *tools)
