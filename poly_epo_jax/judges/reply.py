"""Parses and validates replies of the language model judge, because servers may not enforce the JSON schema.

A reply is a JSON object. It may follow closed think blocks, and may be enclosed in one code fence.
"""

import json
import re
from reprlib import repr as _brief
from typing import Any

import numpy as np

from poly_epo_jax.judges.prompt import DEFAULT_KEYS, ReplyKeys
from poly_epo_jax.system.text import printable
from poly_epo_jax.types import DEGENERATE_CLUSTER, Clustering

THINK_BLOCKS = re.compile(r"\A(?:\s*<think>.*?</think>)+", re.DOTALL)

MAX_TOKENS = 2**31
"""Numbers of tokens from this number on are not counted, because no request has that many."""


class ReplyError(Exception):
    """Raised when a request has no valid reply.

    Attributes:
      kind: "truncated" if the reply is incomplete, "malformed" if it is not a valid clustering or list of models.
        Failed requests have other kinds, see `LLMJudge`.
    """

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


def read_clustering(
    body: bytes, num_responses: int, keys: ReplyKeys = DEFAULT_KEYS, section: str = "judge"
) -> Clustering:
    """Parses the clustering in a chat completion.

    Args:
      body: Body of the HTTP response.
      num_responses: Number N of responses that were requested to be clustered.
      keys: Names of the entries of a reply.
      section: Dotted name of the section of the judge, for error messages.

    Returns:
      Cluster ids in 1..N or 100, with rationales.

    Raises:
      ReplyError: If the body is not a chat completion, the reply is incomplete, or its content does not match
        `reply_schema`.
    """
    name, content = read_content(body, f"raise {section}.options.max_tokens")
    verdicts = _parse(_without_fence(content), name)
    names = [str(number) for number in range(1, num_responses + 1)]
    if not isinstance(verdicts, dict):
        raise ReplyError("malformed", f"the reply must be a JSON object, but is {_brief(verdicts)}")
    if missing := [name for name in names if name not in verdicts]:
        raise ReplyError("malformed", f"the reply does not contain response {', '.join(missing)}")
    if extra := [name for name in verdicts if name not in names]:
        raise ReplyError("malformed", f"the reply contains unknown responses: {_brief(extra)}")
    allowed = {*range(1, num_responses + 1), DEGENERATE_CLUSTER}
    rationales, ids = zip(*(_verdict(name, verdicts[name], allowed, keys) for name in names), strict=True)
    return Clustering(np.array(ids, np.int32), rationales)


def read_model_name(body: bytes, section: str = "judge") -> str:
    """Returns the name of the first model in a list of models.

    Args:
      body: Body of the HTTP response.
      section: Dotted name of the section of the judge, for error messages.

    Raises:
      ReplyError: If the list is empty or malformed.
    """
    match _parse(body.decode(errors="replace"), "the list of models"):
        case {"data": [{"id": str(name)}, *_]}:
            return name
    raise ReplyError("malformed", f"/v1/models does not list a model; set {section}.model")


def read_context(body: bytes, model: str) -> int:
    """Returns the maximum number of tokens of prompt and reply in a list of models, or 0 if it is not listed.

    Args:
      body: Body of the HTTP response.
      model: Name of the model on the server. If empty, the first model with a context length is used.

    Raises:
      ReplyError: If the body is not JSON.
    """
    listed = _parse(body.decode(errors="replace"), "the list of models")
    models = listed.get("data") if isinstance(listed, dict) else None
    for entry in models if isinstance(models, list) else []:
        match entry:
            case {"id": str(name), "max_model_len": int(context)} if name == model or not model:
                return max(context, 0)
    return 0


def read_usage(body: bytes) -> dict[str, int]:
    """Returns the numbers of tokens that a chat completion reports: "prompt_tokens" and "reply_tokens".

    Numbers that are missing or invalid are omitted, because servers need not report them.
    """
    try:
        usage = json.loads(body)["usage"]
        counts = {"prompt_tokens": usage["prompt_tokens"], "reply_tokens": usage["completion_tokens"]}
    except (ValueError, RecursionError, TypeError, LookupError):
        return {}
    return {name: count for name, count in counts.items() if type(count) is int and 0 <= count < MAX_TOKENS}


def read_error(body: bytes) -> dict[str, Any]:
    """Returns the error object of a response body, or an empty dict if the body reports no error."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    match content:
        case {"error": error} | [{"error": error}, *_] | {"choices": [{"error": error}, *_]} if error:
            return error if isinstance(error, dict) else {"message": error}
        case {"object": "error"}:
            return content
    return {}


def read_content(body: bytes, remedy: str) -> tuple[str, str]:
    """Returns the text of a chat completion without think blocks, after its name for error messages.

    Args:
      body: Body of the HTTP response.
      remedy: Remedy if the text reached its token limit, for the error message.

    Raises:
      ReplyError: If the body is not a chat completion, or the text is incomplete or empty.
    """
    match completion := _parse(body.decode(errors="replace"), "the completion"):
        case {"choices": [{"finish_reason": str(finish_reason), "message": {**message}}, *_]}:
            pass
        case _:
            raise ReplyError("malformed", f"the response must be a chat completion, but is {_brief(completion)}")
    # Servers that treat the model as a reasoning model return the constrained output as its reasoning: SGLang in
    # `reasoning_content`, vLLM in `reasoning`.
    fields = {name: message.get(name) for name in ("content", "reasoning_content", "reasoning")}
    texts = [(name, text) for name, text in fields.items() if isinstance(text, str) and text.strip()]
    if finish_reason == "length":
        place = "" if texts and texts[0][0] == "content" else " before its content began"
        raise ReplyError("truncated", f"the reply reached its token limit{place}; {remedy}")
    if finish_reason == "content_filter":
        raise ReplyError("truncated", "the server's content filter stopped the reply")
    if finish_reason != "stop":
        raise ReplyError("truncated", f"the reply is incomplete (finish_reason={_brief(finish_reason)})")
    match message:
        case {"refusal": str(refusal)} if refusal.strip():
            raise ReplyError("malformed", f"the model refused to reply: {_brief(refusal)}")
        case {"content": [*_]}:
            raise ReplyError("malformed", "the content of the reply is a list of parts, but must be a string")
    if not texts:
        raise ReplyError("malformed", "the reply is empty")
    name, text = texts[0][0], THINK_BLOCKS.sub("", texts[0][1]).strip()
    return "the reply" if name == "content" else f"the content of the reply is empty, and its {name}", text


def _without_fence(text: str) -> str:
    """Returns the content of a code fence, or the text if it is not a code fence.

    A regular expression would take cubic time for long sequences of backticks or whitespace.
    """
    content = text.strip("`")
    fence = text[: text.index(content)] if content else ""
    if len(fence) < 3 or text != f"{fence}{content}{fence}":
        return text
    return (content[4:] if content[:4].lower() == "json" else content).strip()


def _parse(text: str, name: str) -> Any:
    try:
        # strict=False: constrained decoding may leave raw control characters in strings.
        return json.loads(text, strict=False, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ReplyError("malformed", f"{name} is not JSON ({_flaw(text, error)})") from None


def _flaw(text: str, error: Exception) -> str:
    """Describes why a text is not JSON, with specific messages for common mistakes of judges."""
    match text.strip():
        case fenced if fenced.startswith("```"):
            return "its code fence is not closed, or has text around it"
        case thinking if thinking.startswith("<think>"):
            return "its think block is not closed"
        case thinking if re.match(r"(?!{)(?:(?!<think>).)*?</think>", thinking, re.DOTALL):
            return "it has reasoning without <think> before </think>; start the server with a reasoning parser"
        case surrounded if "{" in surrounded and not surrounded.startswith(("{", "[")):
            return "it has leading text"
    return f"it has trailing text: {error}" if "Extra data" in str(error) else str(error)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ReplyError("malformed", f"the keys {_brief([key for key, _ in pairs])} contain a duplicate")
    return unique


def _verdict(name: str, verdict: Any, allowed: set[int], keys: ReplyKeys) -> tuple[str, int]:
    if isinstance(verdict, dict) and verdict.keys() == set(keys):
        rationale, cluster = verdict[keys.rationale], verdict[keys.cluster]
        if isinstance(rationale, str) and rationale.strip():
            # `in` alone would also accept `True` and 1.0.
            if type(cluster) is int and cluster in allowed:
                return printable(rationale), cluster
            raise ReplyError("malformed", f"response {name} has an invalid cluster id: {_brief(cluster)}")
    raise ReplyError(
        "malformed",
        f"response {name} must have a text {keys.rationale!r} and a number {keys.cluster!r}, but has {_brief(verdict)}",
    )
