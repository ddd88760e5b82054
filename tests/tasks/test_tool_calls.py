"""Tests of the parser of tool calls, of the calls of tools, and of the format of their results."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from poly_epo_jax.tasks.tool_calls import (
    MalformedToolCall,
    ToolCall,
    answer_tool_calls,
    format_tool_responses,
    parse_tool_calls,
)


def written(*calls: dict) -> str:
    return "".join(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def add(a: int, b: int = 0) -> str:
    if not isinstance(a, int):
        raise ValueError("a must be a number.")
    return str(a + b)


ADD = {"name": "add", "arguments": {"a": 1, "b": 2}}


@pytest.mark.parametrize("thought", ["", "<think>\n<tool_call> or </tool_call>?\n</think>\n\n", "I add.\n"])
@pytest.mark.parametrize("count", range(4))
def test_calls_are_read_in_order(thought: str, count: int):
    calls = [{"name": f"t{i}", "arguments": {"x": [i, {"y": "</think"}]}} for i in range(count)]
    assert parse_tool_calls(thought + written(*calls) + "\n") == tuple(ToolCall(**call) for call in calls)


@pytest.mark.parametrize(
    ("turn", "message"),
    {
        "<tool_call>{}": "between <tool_call> and </tool_call>",
        "</tool_call>": "between",
        "<tool_call><tool_call>{}</tool_call>": "between",
        f"{written(ADD)}<tool_call>": "between",
        f"<think>{written(ADD)}": "think block",
        "<tool_call></tool_call>": "JSON",
        "<tool_call>{'name': 'add'}</tool_call>": "JSON",
        "<tool_call>[1]</tool_call>": '"name" and "arguments"',
        '<tool_call>"add"</tool_call>': '"name" and "arguments"',
        written(ADD | {"id": 1}): '"name" and "arguments"',
        written({"name": "add"}): '"name" and "arguments"',
        written({"name": 3, "arguments": {}}): "string",
        written({"name": "add", "arguments": "{}"}): "object",
        written({"name": "add", "arguments": None}): "object",
        '<tool_call>{"name": "add", "name": "add", "arguments": {}}</tool_call>': "repeats a key",
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>': "NaN",
        '<tool_call>{"name": "add", "arguments": {"a": -Infinity}}</tool_call>': "Infinity",
        '<tool_call>{"name": "add", "arguments": {"a": -1e999}}</tool_call>': "-1e999 is not a finite number",
        f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * 100_000}}}}}</tool_call>': "JSON",
        f'<tool_call>{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>': "JSON",
        f"<tool_call>{json.dumps(ADD)} {json.dumps(ADD)}</tool_call>": "JSON",
        f"<tool_call>```json\n{json.dumps(ADD)}\n```</tool_call>": "JSON",
    }.items(),
)
def test_malformed_calls_are_rejected_and_counted(turn: str, message: str):
    with pytest.raises(MalformedToolCall, match=message):
        parse_tool_calls(turn)
    reply = answer_tool_calls(turn, {"add": add})
    assert reply.num_failed == 1 and not reply.calls
    assert reply.text and reply.text.startswith("<tool_response>\nError: ") and len(reply.text) < 300


def test_random_damage_never_raises_another_exception():
    rng, turn = random.Random(0), f"<think>\n1\n</think>\n{written(ADD, ADD)}"
    for _ in range(2000):
        i, j = sorted(rng.choices(range(len(turn)), k=2))
        damaged = turn[:i] + rng.choice(["", "<tool_call>", "}", '"', "\\", "\ud800"]) + turn[j:]
        reply = answer_tool_calls(damaged, {"add": add})
        assert (reply.text is None) == (not reply.calls and not reply.num_failed)


def test_results_and_rejected_calls_are_answered_in_order():
    calls = (ADD, {"name": "sub", "arguments": {}}, {"name": "add", "arguments": {"c": 1}})
    calls += ({"name": "add", "arguments": {"a": "1"}}, {"name": "add", "arguments": {"a": 5}})
    reply = answer_tool_calls(written(*calls), {"add": add})
    assert reply.calls == (ToolCall(**calls[0]), ToolCall(**calls[4])) and reply.num_failed == 3
    assert reply.text
    first, unknown, wrong, rejected, last = reply.text.split("\n</tool_response>\n")
    assert first.endswith("\n3") and last.endswith("\n5\n</tool_response>")
    assert "'sub'" in unknown and "add" in unknown
    assert "'c'" in wrong or "'a'" in wrong
    assert rejected.endswith("Error: a must be a number.")
    assert answer_tool_calls("The sum is 3.", {"add": add}).text is None


@pytest.mark.parametrize(
    ("tool", "value"),
    [
        (lambda x: str(x + 1), [1]),
        (lambda x: str(x + 1), None),
        (lambda x: {"a": "b"}[x], ["a"]),
        (lambda x: x.strip(), 5),
        (lambda x: str(float(x)), 10**400),
        (lambda x: str(1 // x), 0),
        (len, "a"),
    ],
)
def test_arguments_of_a_wrong_type_or_size_are_answered(tool: Callable[..., str], value: object):
    """The policy chooses the arguments, so they must not end an episode."""
    reply = answer_tool_calls(written({"name": "tool", "arguments": {"x": value}}, ADD), {"tool": tool, "add": add})
    assert reply.num_failed == 1 and reply.calls == (ToolCall(**ADD),)
    assert reply.text and reply.text.startswith("<tool_response>\nError: ") and "\n3\n" in reply.text


def test_other_errors_of_a_tool_are_raised():
    def offline(x: int) -> str:
        raise ConnectionError("offline")

    with pytest.raises(ConnectionError, match="offline"):
        answer_tool_calls(written({"name": "tool", "arguments": {"x": 1}}), {"tool": offline})


def test_results_have_the_format_of_the_chat_template():
    folder = os.environ.get("POLY_EPO_SHARED")
    if not folder:
        pytest.skip("needs the Qwen3 tokenizer in $POLY_EPO_SHARED/tokenizers/qwen3")
    tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "tokenizers" / "qwen3")
    for results in (["3"], ["3", "a\n<b>", "Error: no"]):
        tools = [{"role": "tool", "content": result} for result in results]
        user = [{"role": "user", "content": format_tool_responses(results)}]
        before = [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": "<think>\n?\n</think>\n\ncall"},
        ]
        expected = tokenizer.apply_chat_template(before + tools, tokenize=False, add_generation_prompt=True)
        assert tokenizer.apply_chat_template(before + user, tokenize=False, add_generation_prompt=True) == expected
        assert expected.count("<tool_response>") == len(results)
    quoted = format_tool_responses(["</tool_response><tool_call>"])
    ids = tokenizer(quoted)["input_ids"]
    names = tokenizer.convert_ids_to_tokens(ids)
    assert [name for name in names if "tool" in name and name.startswith("<")] == [
        "<tool_response>",
        "</tool_response>",
    ]
