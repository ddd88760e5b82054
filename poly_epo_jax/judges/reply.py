"""Reads a judge's reply and trusts nothing in it: the schema that the server should enforce is checked again here."""

import json
from reprlib import repr as _brief
from typing import Any

import numpy as np

from poly_epo_jax.system.text import printable
from poly_epo_jax.types import DEGENERATE_CLUSTER, Clustering


class ReplyError(Exception):
    """A reply that is not a clustering. `kind` is "truncated" (the reply is incomplete) or "malformed"."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


def read_clustering(body: bytes, num_responses: int) -> Clustering:
    """The clustering in a chat completion: a verdict for each of N responses, with ids in 1..N or 100.

    Raises:
      ReplyError: anything about it is not as requested.
    """
    verdicts = _parse(_content(_parse(body.decode(errors="replace"), "the completion")), "the reply")
    names = [str(number) for number in range(1, num_responses + 1)]
    if not isinstance(verdicts, dict):
        raise ReplyError("malformed", f"the reply is no JSON object but {_brief(verdicts)}")
    if missing := [name for name in names if name not in verdicts]:
        raise ReplyError("malformed", f"the reply leaves out response {', '.join(missing)}")
    if extra := [name for name in verdicts if name not in names]:
        raise ReplyError("malformed", f"the reply has keys that are no responses: {_brief(extra)}")
    allowed = {*range(1, num_responses + 1), DEGENERATE_CLUSTER}
    rationales, ids = zip(*(_verdict(name, verdicts[name], allowed) for name in names), strict=True)
    return Clustering(np.array(ids, np.int32), rationales)


def read_model_name(body: bytes) -> str:
    """The first model that a server lists.

    Raises:
      ReplyError: it lists none.
    """
    match _parse(body.decode(errors="replace"), "the list of models"):
        case {"data": [{"id": str(name)}, *_]}:
            return name
    raise ReplyError("malformed", "its /v1/models lists no model; name one in judge.model")


def read_context(body: bytes, model: str) -> int:
    """How many tokens a model's prompt and reply may take together, as its server lists it; 0 if it does not.

    Args:
      model: the model's name on the server; "": the first one.

    Raises:
      ReplyError: this is not a list of models.
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
            raise ReplyError("malformed", f"the server's answer is no chat completion but {_brief(completion)}")
    if finish_reason == "length":
        raise ReplyError("truncated", "the reply reached its token limit; raise max_tokens of judge.options")
    if finish_reason != "stop":
        raise ReplyError("truncated", f"the reply was broken off (finish_reason {_brief(finish_reason)})")
    # Servers that take a model for a reasoning model put its constrained output in the second field.
    for field in ("content", "reasoning_content"):
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
    """What is wrong with a text that is not JSON, in words that distinguish the usual mistakes of judges."""
    match text.strip():
        case fenced if fenced.startswith("```"):
            return "it stands in a code fence"
        case surrounded if "{" in surrounded and not surrounded.startswith("{"):
            return "there is text before it"
    return f"there is text after it: {error}" if "Extra data" in str(error) else str(error)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ReplyError("malformed", f"a key occurs twice among {_brief([key for key, _ in pairs])}")
    return unique


def _verdict(name: str, verdict: Any, allowed: set[int]) -> tuple[str, int]:
    match verdict:
        case {"rationale": str(rationale), "cluster": cluster} if rationale.strip() and len(verdict) == 2:
            # `in` alone would accept `True` and 1.0, too.
            if type(cluster) is int and cluster in allowed:
                return printable(rationale), cluster
            raise ReplyError("malformed", f"response {name} is put into cluster {_brief(cluster)}, which is none")
    raise ReplyError("malformed", f"response {name} has no rationale and cluster but {_brief(verdict)}")
