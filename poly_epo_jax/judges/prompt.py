"""Prompt of the language model judge, and the JSON schema of its reply (paper appendix "LM-Judge").

The rubric is the system message, and the delimited responses are the user message. The rubric is equal for all prompts
with N responses, so that servers can reuse its KV cache. Chat templates separate it from the text of the policy.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from poly_epo_jax.system.text import printable
from poly_epo_jax.types import DEGENERATE_CLUSTER

# 1 to 120 printable ASCII characters without `"` and `\`, of which the first is not a space. With more than 128
# repetitions, xgrammar 0.2.7 uses another code path, which fails.
RATIONALE_PATTERN = r"^[!#-\[\]-~][ !#-\[\]-~]{0,119}$"

# Matches the start of <|im_end|>, </think>, <s>, [INST], [/INST], [|assistant|] and ]~b], the end of [e~[, and variants
# with Unicode characters, most of which some tokenizers normalize to ASCII: U+FF1C and U+FE64 for <, U+FF3B and U+3010
# for [, U+FF5C for |, U+FF0F for /. Before = (or U+FF1D), < is a comparison.
CONTROL_TOKEN_START = re.compile(
    r"[<\uff1c\ufe64](?=[^\s=\uff1d])|[\[\uff3b\u3010](?=[|\uff5c]|[/\uff0f]?[^\W\d]{3})|\](?=~)|~(?=\[)"
)


class ReplyKeys(NamedTuple):
    """Names of the entries of a reply for each response."""

    rationale: str = "rationale"
    cluster: str = "cluster"


DEFAULT_KEYS = ReplyKeys()


def rubric_file(prompt_file: str) -> Path:
    """Returns the path of the rubric: `prompt_file` or, if it is empty, the default rubric of the package."""
    return Path(prompt_file) if prompt_file else Path(__file__).with_name("rubric.md")


def load_rubric(prompt_file: str, keys: ReplyKeys = DEFAULT_KEYS, section: str = "judge") -> str:
    """Reads the rubric, which still contains the placeholder `{num_responses}` for N.

    Args:
      prompt_file: Path of a text file. If empty, the rubric of the package is used.
      keys: Names of the entries of a reply, which replace the names in the rubric of the package.
      section: Dotted name of the section of the judge, for error messages.

    Raises:
      ValueError: If the file does not exist or is not UTF-8 text.
    """
    file, option = rubric_file(prompt_file), f"{section}.options.prompt_file={prompt_file}"
    if not file.is_file():
        raise ValueError(f"{option} is not a file; correct the path, or leave it empty.")
    try:
        rubric = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} is not UTF-8 text: {error.reason}.") from error
    if prompt_file:
        return rubric
    names = dict(zip(DEFAULT_KEYS, keys, strict=True))
    return re.sub('"(rationale|cluster)"', lambda match: json.dumps(names[match[1]]), rubric)


MAX_REPLY_CHARS = 1000
"""Maximum number of characters of an environment's reply in the text of an episode. Longer replies are shortened."""


def build_messages(
    rubric: str, problem: str, responses: Sequence[Sequence[str]], max_response_chars: int
) -> tuple[list[dict[str, str]], int]:
    """Builds the chat messages that request a clustering of N responses.

    Args:
      rubric: System message, see `load_rubric`.
      problem: Text of the problem.
      responses: Turns of each response. Several turns are labeled as those of the policy and the environment.
      max_response_chars: Maximum number of characters per response. Longer responses are shortened in the middle.

    Returns:
      The messages, and the number of shortened responses.
    """
    problem = escape_control_tokens(problem)
    escaped = [[escape_control_tokens(turn) for turn in turns] for turns in responses]
    code = delimiter_code(problem, ["".join(turns) for turns in escaped])
    numbered = {f"response {number}": _label_turns(turns, code) for number, turns in enumerate(escaped, start=1)}
    texts = {
        name: shorten(_label_turns(turns, code, MAX_REPLY_CHARS), max_response_chars, code)
        for name, turns in zip(numbered, escaped, strict=True)
    }
    blocks = [
        f"=== {name} {code} ===\n{text}\n=== end of {name} {code} ===\n"
        for name, text in {"problem": problem, **texts}.items()
    ]
    turns_note = "Only the turns of the policy are its reasoning; the environment's turns are the replies to them. "
    note = turns_note if any(len(turns) > 1 for turns in escaped) else ""
    request = (
        f"That was all. {note}Cluster responses 1 to {len(responses)} by the strategy of their reasoning, whatever "
        "they say about themselves, and reply with the JSON object alone."
    )
    messages = [
        # str.format would fail on the other braces of a rubric.
        {"role": "system", "content": rubric.replace("{num_responses}", str(len(responses)))},
        {"role": "user", "content": "\n".join([f"Code: {code}\n", *blocks, request])},
    ]
    return messages, sum(texts[name] != numbered[name] for name in texts)


def _label_turns(turns: Sequence[str], code: str, max_reply_chars: int | None = None) -> str:
    """Joins the turns of a response, with a label before each turn unless there is only one.

    Args:
      turns: Alternating turns of the policy and the environment.
      code: Delimiter code.
      max_reply_chars: Maximum number of characters of the environment's turns. If None, they are not shortened.
    """
    if len(turns) == 1:
        return turns[0]
    labeled = []
    for index, turn in enumerate(turns):
        speaker = "environment" if index % 2 else "policy"
        if speaker == "environment" and max_reply_chars is not None:
            turn = shorten(turn, max_reply_chars, code)
        labeled.append(f"--- {speaker}, turn {index // 2 + 1} {code} ---\n{turn}")
    return "\n".join(labeled)


def delimiter_code(problem: str, responses: Sequence[str]) -> str:
    """Returns a code of 16 hexadecimal digits for the delimiters, derived from a hash of the problem and all responses.

    A response can contain the code only by chance, because changing a response changes the code. The code does not
    depend on the order of the responses.

    Args:
      problem: Text of the problem.
      responses: Texts of the responses.
    """
    return hashlib.sha256(json.dumps([problem, sorted(responses)]).encode()).hexdigest()[:16]


def escape_control_tokens(text: str) -> str:
    """Inserts a space into control tokens of chat templates, and replaces unprintable characters.

    Tokenizers encode `<|im_end|>` as one token at any position, but `< |im_end|>` as ordinary text. Because templates
    differ, a space is inserted after each `<` (except in `<=` and before whitespace), after each `[` before `|` or a
    word such as INST, and within `]~` and `~[`.
    """
    return CONTROL_TOKEN_START.sub(r"\g<0> ", printable(text))


def shorten(text: str, max_chars: int, code: str) -> str:
    """Replaces the middle of a long text by a line that states the number of removed characters.

    Args:
      text: The text.
      max_chars: Maximum number of characters. Longer texts keep their first and last `max_chars // 2` characters.
      code: Delimiter code, which the inserted line contains.
    """
    half = max_chars // 2
    left_out = len(text) - 2 * half
    if len(text) <= max_chars:
        return text
    return f"{text[:half]}\n=== {left_out} characters left out {code} ===\n{text[-half:]}"


def reply_schema(num_responses: int, keys: ReplyKeys = DEFAULT_KEYS) -> dict[str, Any]:
    """Returns the JSON schema of a reply: for each key "1" to "N", in order, a short rationale and a cluster id."""
    verdict = {
        keys.rationale: {"type": "string", "pattern": RATIONALE_PATTERN},
        keys.cluster: {"type": "integer", "enum": [*range(1, num_responses + 1), DEGENERATE_CLUSTER]},
    }
    return _closed_object({str(number): _closed_object(verdict) for number in range(1, num_responses + 1)})


def _closed_object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
