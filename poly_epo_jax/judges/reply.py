"""Parses and validates replies of the language model judge, because servers may not enforce the JSON schema."""

import json
from reprlib import repr as _brief
from typing import Any

import numpy as np

from poly_epo_jax.system.text import printable
from poly_epo_jax.types import DEGENERATE_CLUSTER, Clustering


class ReplyError(Exception):
    """Raised when a reply is not a valid clustering, or when a list of models is invalid.

    Attributes:
      kind: "truncated" if the reply is incomplete, otherwise "malformed".
    """

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


def read_clustering(body: bytes, num_responses: int) -> Clustering:
    """Parses the clustering in a chat completion.

    Args:
      body: Body of the HTTP response.
      num_responses: Number N of responses that were requested to be clustered.

    Returns:
      Cluster ids in 1..N or 100, with rationales.

    Raises:
      ReplyError: If the body is not a chat completion, the reply is incomplete, or its content does not match
        `reply_schema`.
    """
    verdicts = _parse(_content(_parse(body.decode(errors="replace"), "the completion")), "the reply")
    names = [str(number) for number in range(1, num_responses + 1)]
    if not isinstance(verdicts, dict):
        raise ReplyError("malformed", f"the reply must be a JSON object, but is {_brief(verdicts)}")
    if missing := [name for name in names if name not in verdicts]:
        raise ReplyError("malformed", f"the reply does not contain response {', '.join(missing)}")
    if extra := [name for name in verdicts if name not in names]:
        raise ReplyError("malformed", f"the reply contains unknown responses: {_brief(extra)}")
    allowed = {*range(1, num_responses + 1), DEGENERATE_CLUSTER}
    rationales, ids = zip(*(_verdict(name, verdicts[name], allowed) for name in names), strict=True)
    return Clustering(np.array(ids, np.int32), rationales)


def read_model_name(body: bytes) -> str:
    """Returns the name of the first model in a list of models.

    Raises:
      ReplyError: If the list is empty or malformed.
    """
    match _parse(body.decode(errors="replace"), "the list of models"):
        case {"data": [{"id": str(name)}, *_]}:
            return name
    raise ReplyError("malformed", "/v1/models does not list a model; set judge.model")


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


def _content(completion: Any) -> str:
    match completion:
        case {"choices": [{"finish_reason": str(finish_reason), "message": {**message}}, *_]}:
            pass
        case _:
            raise ReplyError("malformed", f"the response must be a chat completion, but is {_brief(completion)}")
    if finish_reason == "length":
        raise ReplyError("truncated", "the reply reached its token limit; raise judge.options.max_tokens")
    if finish_reason != "stop":
        raise ReplyError("truncated", f"the reply is incomplete (finish_reason={_brief(finish_reason)})")
    # Servers that treat the model as a reasoning model return the constrained output in another field: SGLang in
    # `reasoning_content`, vLLM in `reasoning`.
    for field in ("content", "reasoning_content", "reasoning"):
        match message.get(field):
            case str(content) if content.strip():
                return content
    raise ReplyError("malformed", "the reply is empty")


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
            return "it is in a code fence"
        case surrounded if "{" in surrounded and not surrounded.startswith("{"):
            return "it has leading text"
    return f"it has trailing text: {error}" if "Extra data" in str(error) else str(error)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ReplyError("malformed", f"the keys {_brief([key for key, _ in pairs])} contain a duplicate")
    return unique


def _verdict(name: str, verdict: Any, allowed: set[int]) -> tuple[str, int]:
    match verdict:
        case {"rationale": str(rationale), "cluster": cluster} if rationale.strip() and len(verdict) == 2:
            # `in` alone would also accept `True` and 1.0.
            if type(cluster) is int and cluster in allowed:
                return printable(rationale), cluster
            raise ReplyError("malformed", f"response {name} has an invalid cluster id: {_brief(cluster)}")
    raise ReplyError("malformed", f"response {name} must have a rationale and a cluster, but has {_brief(verdict)}")
