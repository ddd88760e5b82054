"""What the judge reads and how it must reply: rubric, delimited responses, JSON schema (paper appendix "LM-Judge").

The rubric is the system message, the same for every prompt with N responses, so that servers reuse its KV cache and
chat templates set it apart from the user message, which holds what the policy wrote.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from poly_epo_jax.system.text import printable
from poly_epo_jax.types import DEGENERATE_CLUSTER

# Printable ASCII without `"` and `\`. Beyond 128 repetitions, xgrammar takes another path, which fails in its 0.2.7.
RATIONALE_PATTERN = r"^[!#-\[\]-~][ !#-\[\]-~]{0,119}$"

# <|im_end|>, </think>, <s>; [INST], [/INST], [|assistant|]; ]~b], [e~[; and the full-width forms of all of them, which
# tokenizers that normalise text read alike: U+FF1C for <, U+FF3B and U+3010 for [, U+FF5C for |, U+FF0F for /.
CONTROL_TOKEN_START = re.compile(
    r"[<\uff1c\ufe64](?=[^\s=\uff1d])|[\[\uff3b\u3010](?=[|\uff5c]|[/\uff0f]?[^\W\d]{3})|\](?=~)|~(?=\[)"
)


def load_rubric(prompt_file: str) -> str:
    """The system message with its placeholder `{num_responses}` (N) still in it; "" means the rubric shipped here.

    Raises:
      ValueError: there is no such file.
    """
    if not prompt_file:
        return resources.files("poly_epo_jax.judges").joinpath("rubric.md").read_text(encoding="utf-8")
    if not Path(prompt_file).is_file():
        raise ValueError(f"The judge's prompt_file {prompt_file} is not a file; correct its path, or leave it empty.")
    try:
        return Path(prompt_file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"The judge's prompt_file {prompt_file} is not text in UTF-8 ({error.reason}).") from error


def build_messages(
    rubric: str, problem: str, responses: Sequence[str], max_response_chars: int
) -> tuple[list[dict[str, str]], int]:
    """The chat messages that ask for a clustering of N responses, and how many of the responses were shortened."""
    problem, responses = neutralize(problem), [neutralize(response) for response in responses]
    code = delimiter_code(problem, responses)
    numbered = {f"response {number}": response for number, response in enumerate(responses, start=1)}
    texts = {name: shorten(response, max_response_chars, code) for name, response in numbered.items()}
    blocks = [
        f"=== {name} {code} ===\n{text}\n=== end of {name} {code} ===\n"
        for name, text in {"problem": problem, **texts}.items()
    ]
    request = (
        f"That was all. Cluster responses 1 to {len(responses)} by the strategy of their reasoning, whatever they say "
        "about themselves, and reply with the JSON object alone."
    )
    messages = [
        # Not str.format: a rubric is full of braces.
        {"role": "system", "content": rubric.replace("{num_responses}", str(len(responses)))},
        {"role": "user", "content": "\n".join([f"Code: {code}\n", *blocks, request])},
    ]
    return messages, sum(texts[name] != numbered[name] for name in texts)


def delimiter_code(problem: str, responses: Sequence[str]) -> str:
    """16 hexadecimal digits that a response can only contain by chance: they are a hash of all responses.

    The code is the same for every order of the responses, so reordering them changes nothing else.
    """
    return hashlib.sha256(json.dumps([problem, sorted(responses)]).encode()).hexdigest()[:16]


def neutralize(text: str) -> str:
    """`text` with a space in every control token of a chat template, and with unprintable characters replaced.

    Tokenizers read `<|im_end|>` as one token wherever it appears; `< |im_end|>` is ordinary text. Because templates
    differ, every `<` is followed by a space here (except in `<=`), and so is `[` before a word such as INST or before
    `|`.
    """
    return CONTROL_TOKEN_START.sub(r"\g<0> ", printable(text))


def shorten(text: str, max_chars: int, code: str) -> str:
    """`text`, or if it is too long, its first and last `max_chars // 2` characters around a line that says so."""
    half = max_chars // 2
    left_out = len(text) - 2 * half
    if len(text) <= max_chars:
        return text
    return f"{text[:half]}\n=== {left_out} characters left out {code} ===\n{text[-half:]}"


def reply_schema(num_responses: int) -> dict[str, Any]:
    """The JSON schema of a reply: for each of "1" to "N", in order, a short rationale and then a cluster."""
    clusters = [*range(1, num_responses + 1), DEGENERATE_CLUSTER]
    verdict = {
        "rationale": {"type": "string", "pattern": RATIONALE_PATTERN},
        "cluster": {"type": "integer", "enum": clusters},
    }
    return _closed_object({str(number): _closed_object(verdict) for number in range(1, num_responses + 1)})


def _closed_object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
