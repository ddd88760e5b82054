"""Reads what SGLang answers to /generate, or sglang-jax, which says less. What contradicts itself is not believed."""

from collections.abc import Sequence
from reprlib import repr as _brief
from typing import Any

import numpy as np

from poly_epo_jax.http_client import WrongAnswer, field
from poly_epo_jax.rollouts.sglang.dialect import Answer
from poly_epo_jax.types import FinishReason, Request


def read_answers(body: Any, request: Request, count: int, stop_ids: Sequence[int]) -> list[Answer | WrongAnswer]:
    """The answers to `count` seeds of the request; in place of one that cannot be read, what is wrong with it.

    Raises:
      WrongAnswer: there are not as many.
    """
    answers = body if isinstance(body, list) else [body]
    if len(answers) != count:
        raise WrongAnswer(f"it gave {len(answers)} answers to {count} seeds")
    return [_read(answer, request, stop_ids) for answer in answers]


def _read(answer: Any, request: Request, stop_ids: Sequence[int]) -> Answer | WrongAnswer:
    try:
        version = _weight_version(field(answer, "meta_info", dict))
        reason = field(answer, "meta_info.finish_reason.type", str)
        if reason == "abort":  # with the tokens that it had by then
            return Answer(np.zeros(0, np.int64), np.zeros(0), None, version or "")
        if (prompt := field(answer, "meta_info.prompt_tokens", int)) != len(request.prompt_ids):
            raise WrongAnswer(f"its answer is to a prompt of {prompt} tokens, not {len(request.prompt_ids)}")
        token_ids, logprobs = _tokens(answer, is_jax=version is None)
        finish_reason = _finish_reason(answer, reason, token_ids, request.max_tokens, stop_ids)
        return Answer(np.array(token_ids, np.int64), np.array(logprobs), finish_reason, version or "")
    except WrongAnswer as error:
        return error


def _weight_version(info: dict[str, Any]) -> str | None:
    """None from sglang-jax, which names no weights."""
    if "weight_version" not in info:
        return None
    version = field(info, "weight_version", str)
    spans = [] if info.get("weight_versions") is None else field(info, "weight_versions", list)
    for span in spans:
        if (other := field(span, "version", str)) != version:
            raise WrongAnswer(f"its answer is partly from weights {other}, partly from {version}")
    return version


def _tokens(answer: Any, is_jax: bool) -> tuple[list[int], list[float]]:
    """Of the two lists that name tokens, the one with log-probabilities; the other must agree."""
    count = field(answer, "meta_info.completion_tokens", int)
    entries = field(answer, "meta_info.output_token_logprobs", list)
    output_ids = field(answer, "output_ids", list)
    # sglang-jax repeats entries before those of the generation, and leaves special tokens out of output_ids.
    if count < 1 or not (len(entries) >= count if is_jax else len(entries) == len(output_ids) == count):
        raise WrongAnswer(
            f"its answer has completion_tokens {count}, {len(entries)} output_token_logprobs and {len(output_ids)} "
            "output_ids"
        )
    token_ids, logprobs = [], []
    for place, entry in enumerate(entries[-count:]):
        match entry:
            case [float(logprob), int(token_id), *_] if type(token_id) is int and abs(token_id) < 2**31:
                token_ids.append(token_id)
                logprobs.append(logprob)
            case _:
                raise WrongAnswer(f"its answer's output_token_logprobs[{place}] is {_brief(entry)}")
    rest = iter(token_ids)
    if any(type(one) is not int or one not in rest for one in output_ids):  # in this order
        raise WrongAnswer("its answer's output_ids are not the tokens of its output_token_logprobs")
    return token_ids, logprobs


def _finish_reason(
    answer: Any, reason: str, token_ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]
) -> FinishReason:
    match reason:
        case "length":
            # SGLang looks at the length before it looks at the last token.
            return "stop" if len(token_ids) == max_tokens and token_ids[-1] in stop_ids else "length"
        case "stop":
            # After a NaN, it matched "NaN happened".
            if (matched := field(answer, "meta_info.finish_reason.matched", int)) != token_ids[-1]:
                raise WrongAnswer(f"its answer stopped at token {matched}, but its last token is {token_ids[-1]}")
            return "stop"
    raise WrongAnswer(f"its answer's meta_info.finish_reason.type is {_brief(reason)}, none of stop, length and abort")
