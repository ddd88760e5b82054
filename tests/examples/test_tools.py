"""Tests of the calculator in docs/how_to/tools.md, which runs exactly as shown."""

import asyncio
import dataclasses
import importlib
import json
import os
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extending import files_on
from fakes import PATIENCE
from responses import response
from transformers import AutoTokenizer

from poly_epo_jax.rollouts.between_turns import encode_between
from poly_epo_jax.rollouts.environments import Environments
from poly_epo_jax.rollouts.prompts import encode_prompts
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.types import Generation, Interactive, Outcome

(NAME, TEXT), *_ = files_on("how_to/tools.md").items()


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the file defines."""
    file = tmp_path_factory.mktemp("mine") / NAME
    file.write_text(TEXT)
    try:
        return runpy.run_path(str(file))
    finally:
        TASKS.pop("calculator", None)


def call(expression: Any, **keys: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'calculate', 'arguments': {'expression': expression}} | keys)}</tool_call>"


def play(task: Any, *turns: str) -> tuple[list[str | None], Outcome]:
    async def episode() -> tuple[list[str | None], Outcome]:
        started, replies = task.start(task.train_problems[0], 0), []
        for turn in turns:
            replies.append(await started.reply(dataclasses.replace(response(""), turns=(turn,))))
        return replies, await started.close()

    return asyncio.run(episode())


def test_the_file_is_short():
    assert len([line for line in TEXT.splitlines() if line]) < 60


def test_episodes(calculator: dict[str, Any]):
    task = calculator["CalculatorTask"](10)
    assert isinstance(task, Interactive) and len(task.train_problems) == len(task.held_out_problems) == 5
    problem = task.train_problems[0]
    question = problem.id
    replies, outcome = play(task, f"<think>\n?\n</think>\n\n{call(question)}", f"It is {problem.answer}.")
    assert replies == [f"<tool_response>\n{problem.answer}\n</tool_response>", None]
    assert outcome == Outcome(1.0, (question,))
    replies, outcome = play(task, call("1", id=3), call("1 +"), call("2"), f"It is 1{problem.answer}")
    assert [reply and "Error" in reply for reply in replies] == [True, True, False, None]
    assert outcome == Outcome(0.0, ("2",))
    assert play(task, call("1"))[1].reward == 0


def test_episodes_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / NAME).write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    task = importlib.import_module(NAME.removesuffix(".py")).CalculatorTask(10)
    problem = task.train_problems[0]
    environments = Environments(task, PATIENCE, num_workers=1)

    async def take_turn(before: Generation, reply: str) -> Generation:
        return dataclasses.replace(before, turns=(*before.turns, reply, f"It is {problem.answer}."))

    first = dataclasses.replace(response(""), turns=(call(problem.id),))
    try:
        played = asyncio.run(environments.play(problem, 0, first, take_turn))
    finally:
        TASKS.pop("calculator", None)
    assert isinstance(played, Generation) and played.outcome == Outcome(1.0, (problem.id,))
    assert played.turns[1] == f"<tool_response>\n{problem.answer}\n</tool_response>"


def test_the_calculator_against_python(calculator: dict[str, Any]):
    calculate, rng = calculator["calculate"], np.random.default_rng(0)
    for _ in range(200):
        a, b, c, d = rng.integers(0, 100, 4).tolist()
        text = f"({a} {rng.choice(['+', '-', '*'])} {b}) * ({c}+{d})**{rng.integers(4)} - {b}"
        assert calculate(text) == str(eval(text))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "9**9**9",
            "2**-1",
            "1/0",
            "1.5",
            "True",
            "'a'*9",
            "(1).real",
            "x",
            "f(1)",
            "[1]",
            "1 if 1 else 2",
            "1<2",
            "~1",
        ),
        *(
            "",
            " ",
            "1 +",
            "1\x00",
            "(" * 99,
            "(" * 40 + "1" + ")" * 40 + "+",
            "10000000000000*1",
            "lambda: 1",
            "1;2",
            "\ud800",
        ),
        *(3, None, ["1"], {"a": 1}, True),
    ],
)
def test_other_expressions_are_rejected(calculator: dict[str, Any], text: Any):
    with pytest.raises(ValueError):
        calculator["calculate"](text)


def test_prompts_and_replies_are_those_of_the_chat_template(calculator: dict[str, Any]):
    folder = os.environ.get("POLY_EPO_SHARED")
    if not folder:
        pytest.skip("needs the Qwen3 tokenizer in $POLY_EPO_SHARED/tokenizers/qwen3")
    tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "tokenizers" / "qwen3")
    task = calculator["CalculatorTask"](2)
    problem = task.train_problems[0]
    messages = [{"role": "user", "content": problem.prompt}]

    def encoded(*further: dict[str, Any]) -> list[int]:
        chat = [*messages, *further]
        text = tokenizer.apply_chat_template(
            chat, tools=[calculator["calculate"]], tokenize=False, add_generation_prompt=True
        )
        return tokenizer(text)["input_ids"]

    (prompt,) = encode_prompts(tokenizer, [problem], 200_000)
    assert prompt.tolist() == encoded() and "calculate" in tokenizer.decode(prompt)
    turn = f"<think>\n?\n</think>\n\n{call('1+2')}"
    (reply,), _ = play(task, turn)
    assert reply is not None
    between = encode_between(tokenizer, reply, True, "<|im_end|>", 200_000).tolist()
    answer = tokenizer(f"{turn}<|im_end|>")["input_ids"]
    tool = {"role": "tool", "content": "3"}
    assert [*prompt, *answer, *between] == encoded({"role": "assistant", "content": turn}, tool)


def test_a_template_without_tools_is_rejected(calculator: dict[str, Any]):
    tokenizer = build_character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    with pytest.raises(ValueError, match="does not support tools"):
        encode_prompts(tokenizer, calculator["CalculatorTask"](2).train_problems, 200)
