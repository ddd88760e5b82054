"""Parses and answers the tool calls of a turn in Qwen3's (Hermes) format.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. The format is parsed strictly, because a repaired
call would be rewarded like a valid one.
"""

import dataclasses
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TAG = re.compile(r"(</?tool_call>)")
NESTED_TAG = re.compile(r"<(?=/?tool_(?:call|response)>)")


class MalformedToolCall(ValueError):
    """Raised when a turn contains a tool call that cannot be read. The message is a reply to the policy."""


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A tool call.

    Attributes:
      name: Name of the tool.
      arguments: Arguments of the tool by name. Their types are not checked.
    """

    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ToolReply:
    """The answer to the tool calls of a turn.

    Attributes:
      text: Reply to the policy. None if the turn contains no call.
      calls: Calls that a tool answered, in order.
      num_failed: Number of calls that were malformed, or that a tool rejected. An unreadable turn counts once.
    """

    text: str | None
    calls: tuple[ToolCall, ...] = ()
    num_failed: int = 0


def parse_tool_calls(turn: str) -> tuple[ToolCall, ...]:
    """Returns the tool calls after the last `</think>` of a turn, in order.

    Args:
      turn: Text of a turn.

    Raises:
      MalformedToolCall: If a tag does not have a counterpart, a call is in a think block that is not closed, or a call
        is not a JSON object with exactly a name and an object of arguments.
    """
    text = turn.rpartition("</think>")[2]
    pieces = TAG.split(text)
    tags = pieces[1::2]
    if tags != ["<tool_call>", "</tool_call>"] * (len(tags) // 2):
        raise MalformedToolCall("write each tool call between <tool_call> and </tool_call>.")
    if tags and "<think>" in text:
        raise MalformedToolCall("close the think block before a tool call.")
    return tuple(map(_parse_call, pieces[2::4]))


def _parse_call(body: str) -> ToolCall:
    try:
        call = json.loads(body, object_pairs_hook=_unique_keys, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise MalformedToolCall(f"a tool call is not valid JSON: {error}.") from error
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        raise MalformedToolCall('a tool call must be a JSON object with the keys "name" and "arguments".')
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
        raise MalformedToolCall('"name" of a tool call must be a string, and "arguments" a JSON object.')
    return ToolCall(call["name"], call["arguments"])


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an object repeats a key")
    return dict(pairs)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


def answer_tool_calls(turn: str, tools: Mapping[str, Callable[..., str]]) -> ToolReply:
    """Calls the tools that a turn requests, in order.

    Args:
      turn: Text of a turn.
      tools: Functions by name. They receive the arguments as keywords, and raise ValueError for arguments that they
        reject. The message is part of the reply. Because the types of arguments are not checked, exceptions that
        values of a wrong type or size cause (TypeError, AttributeError, ArithmeticError, MemoryError) are answered in
        the same way. Other exceptions are not caught.

    Returns:
      The reply. If the turn cannot be parsed, no tool is called and the reply contains the error.
    """
    try:
        calls = parse_tool_calls(turn)
    except MalformedToolCall as error:
        return ToolReply(format_tool_responses([f"Error: {error}"]), num_failed=1)
    results, answered = [], []
    for call in calls:
        try:
            results.append(_run(call, tools))
            answered.append(call)
        except ValueError as error:
            results.append(f"Error: {error}")
    return ToolReply(
        format_tool_responses(results) if results else None, tuple(answered), num_failed=len(calls) - len(answered)
    )


def _run(call: ToolCall, tools: Mapping[str, Callable[..., str]]) -> str:
    if call.name not in tools:
        raise ValueError(f"there is no tool {call.name!r}; the tools are {', '.join(tools)}.")
    tool = tools[call.name]
    try:
        inspect.signature(tool).bind(**call.arguments)
        return tool(**call.arguments)
    except (TypeError, AttributeError, ArithmeticError, MemoryError) as error:
        raise ValueError(f"wrong arguments for {call.name}: {error}.") from error


def format_tool_responses(results: Sequence[str]) -> str:
    """Returns the user message that contains the results of tool calls, as Qwen3's chat template formats them.

    Args:
      results: Result of each call. A space is inserted into tags of calls and responses that they contain.
    """
    return "\n".join(f"<tool_response>\n{NESTED_TAG.sub('< ', result)}\n</tool_response>" for result in results)
