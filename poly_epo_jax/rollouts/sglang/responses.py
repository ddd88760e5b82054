"""Parses responses of SGLang and sglang-jax to generation requests."""

from collections.abc import Sequence
from reprlib import repr as _brief
from typing import Any

import numpy as np

from poly_epo_jax.rollouts.servers.dialect import ServerCompletion, WeightSpan
from poly_epo_jax.system.http_client import InvalidResponseError, field
from poly_epo_jax.types import FinishReason, Request


def parse_responses(
    body: Any, request: Request, count: int, stop_ids: Sequence[int]
) -> list[ServerCompletion | InvalidResponseError]:
    """Parses the response to a generation request.

    Args:
      body: JSON body of the response: one object, or a list of objects.
      request: The request.
      count: Number of seeds that were sent.
      stop_ids: Token ids that end a generation.

    Returns:
      `count` items. Each is a completion, or an `InvalidResponseError` with the reason why it is invalid.

    Raises:
      InvalidResponseError: If the number of completions is not `count`.
    """
    answers = body if isinstance(body, list) else [body]
    if len(answers) != count:
        raise InvalidResponseError(f"the response contains {len(answers)} completions for {count} seeds")
    return [_parse(answer, request, stop_ids) for answer in answers]


def _parse(answer: Any, request: Request, stop_ids: Sequence[int]) -> ServerCompletion | InvalidResponseError:
    try:
        info = field(answer, "meta_info", dict)
        is_jax = "weight_version" not in info  # sglang-jax does not report the name of the weights.
        version = "" if is_jax else field(info, "weight_version", str)
        reason = field(info, "finish_reason.type", str)
        if reason == "abort":  # The response contains the tokens generated so far, which are discarded.
            return ServerCompletion(np.zeros(0, np.int64), np.zeros(0), None, [WeightSpan(0, 0, version)])
        if (prompt := field(info, "prompt_tokens", int)) != len(request.prompt_ids):
            raise InvalidResponseError(
                f"prompt_tokens is {prompt}, but the prompt has {len(request.prompt_ids)} tokens"
            )
        token_ids, logprobs = _tokens(answer, is_jax)
        finish_reason = _finish_reason(answer, reason, token_ids, request.max_tokens, stop_ids)
        weights = _weights(info, WeightSpan(0, len(token_ids), version))
        ids, cached = np.array(token_ids, np.int64), info.get("cached_tokens")
        return ServerCompletion(ids, np.array(logprobs), finish_reason, weights, cached)
    except InvalidResponseError as error:
        return error


def _weights(info: dict[str, Any], whole: WeightSpan) -> list[WeightSpan]:
    """Returns the spans of `weight_versions`, or the span of all tokens if the server does not report spans."""
    if info.get("weight_versions") is None:
        return [whole]
    spans = [
        WeightSpan(field(span, "start", int), field(span, "end", int), field(span, "version", str))
        for span in field(info, "weight_versions", list)
    ]
    if not spans or spans[-1].version != whole.version:
        raise InvalidResponseError(f"weight_versions do not end with weight_version {whole.version}")
    return spans


def _tokens(answer: Any, is_jax: bool) -> tuple[list[int], list[float]]:
    """Returns the tokens and log-probabilities of `output_token_logprobs`, and compares them with `output_ids`."""
    count = field(answer, "meta_info.completion_tokens", int)
    entries = field(answer, "meta_info.output_token_logprobs", list)
    output_ids = field(answer, "output_ids", list)
    # sglang-jax may return repeated entries before the generated tokens, and omits special tokens from output_ids.
    if count < 1 or not (len(entries) >= count if is_jax else len(entries) == len(output_ids) == count):
        raise InvalidResponseError(
            f"completion_tokens is {count}, but the response has {len(entries)} output_token_logprobs and "
            f"{len(output_ids)} output_ids"
        )
    token_ids, logprobs = [], []
    for position, entry in enumerate(entries[-count:]):
        match entry:
            case [float(logprob), int(token_id), *_] if type(token_id) is int and abs(token_id) < 2**31:
                token_ids.append(token_id)
                logprobs.append(logprob)
            case _:
                raise InvalidResponseError(
                    f"output_token_logprobs[{position}] is {_brief(entry)}, not [logprob, token_id, ...]"
                )
    rest = iter(token_ids)  # `in` consumes the iterator, so the order must match.
    if any(type(one) is not int or one not in rest for one in output_ids):
        raise InvalidResponseError("output_ids do not match the tokens of output_token_logprobs")
    return token_ids, logprobs


def _finish_reason(
    answer: Any, reason: str, token_ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]
) -> FinishReason:
    match reason:
        case "length":
            # SGLang reports "length" if a stop token is generated at the maximum length.
            return "stop" if len(token_ids) == max_tokens and token_ids[-1] in stop_ids else "length"
        case "stop":
            # If logits are NaN, SGLang sets `matched` to the string "NaN happened".
            if (matched := field(answer, "meta_info.finish_reason.matched", int)) != token_ids[-1]:
                raise InvalidResponseError(f"it stopped at token {matched}, but its last token is {token_ids[-1]}")
            return "stop"
    raise InvalidResponseError(f"finish_reason.type is {_brief(reason)}, not stop, length or abort")
