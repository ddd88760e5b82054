"""Tests that responses to /generate are parsed, or rejected with a reason. fuzz/servers.py tests many more."""

import asyncio
import re
from typing import Any

import httpx
import numpy as np
import pytest
from fake_servers import answer_to_get, generated, open_rollouts
from fakes import collect, sampler_counts, tiny_problems
from lies import DRAWS, put
from lying_servers import MAX_TOKENS, STOP_IDS, VOCABULARY, LyingServer

from poly_epo_jax.rollouts.completion_check import completion_flaw
from poly_epo_jax.rollouts.sglang.responses import parse_responses
from poly_epo_jax.system.http_client import InvalidResponseError, ServerError
from poly_epo_jax.types import Request, Sampling

REQUEST = Request("p", np.array([3, 4, 5]), np.arange(2, dtype=np.uint32), MAX_TOKENS)
URLS = ["http://a", "http://b"]
HARMLESS = {"abort", "other weights"}  # Valid responses whose generations are resampled.


def flaw(answer: Any) -> str:
    """Returns the reason why a response is invalid, or an empty string."""
    (read,) = parse_responses(answer, REQUEST, 1, STOP_IDS)
    if isinstance(read, InvalidResponseError):
        return str(read)
    assert read.finish_reason is not None
    limits = {"max_tokens": MAX_TOKENS, "stop_ids": STOP_IDS, "vocab_size": VOCABULARY}
    flaw = completion_flaw(read.token_ids, read.logprobs, read.finish_reason, **limits)
    return flaw or read.weight_flaw([str(read.weight_version)])


def honest(seed: int) -> Any:
    """Returns a valid response."""
    return LyingServer().answer(seed, REQUEST.prompt_ids.tolist())


def test_valid_responses_are_parsed():
    reasons = set()
    for seed in range(20):
        (read,) = parse_responses(honest(seed), REQUEST, 1, STOP_IDS)
        assert not isinstance(read, InvalidResponseError) and flaw(honest(seed)) == ""
        reasons.add(read.finish_reason)
    assert reasons == {"stop", "length"}


def test_a_stop_token_at_the_maximum_length_is_reported_as_stop():
    """SGLang reports "length"."""
    answer = DRAWS["log-probability 5.0"](honest(0))  # Only its structure is used.
    entries = [[-1.0, token, None] for token in (3, 3, 3, 1)]
    answer["output_ids"] = [3, 3, 3, 1]
    answer["meta_info"] |= {"completion_tokens": 4, "output_token_logprobs": entries, "weight_versions": None}
    answer["meta_info"]["finish_reason"] = {"type": "length", "length": 4}
    (read,) = parse_responses(answer, REQUEST, 1, STOP_IDS)
    assert not isinstance(read, InvalidResponseError) and read.finish_reason == "stop" and flaw(answer) == ""


@pytest.mark.parametrize("name", sorted(DRAWS.keys() - HARMLESS))
def test_impossible_responses_are_rejected(name: str):
    assert flaw(DRAWS[name](honest(0))).isprintable() and flaw(DRAWS[name](honest(0)))


def test_a_wrong_number_of_completions_is_rejected():
    with pytest.raises(InvalidResponseError, match="1 completions for 2 seeds"):
        parse_responses([honest(0)], REQUEST, 2, STOP_IDS)


def lying(request: httpx.Request) -> httpx.Response:
    """Responds with a token that is not in the vocabulary if the request is for the first server."""
    if request.method == "GET":
        return answer_to_get(request.url.path, weight_version="w")
    answers = generated(request, "w").json()
    answers = answers if isinstance(answers, list) else [answers]
    if request.url.host == "a":
        answers[0] = put(("output_ids", 0), 32, put(("meta_info", "output_token_logprobs", 0, 1), 32, answers[0]))
        answers[0]["meta_info"]["finish_reason"]["matched"] = 32
    return httpx.Response(200, json=answers)


def test_an_invalid_completion_is_resampled_by_another_server(monkeypatch, capsys):
    async def drawn_once(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            asked.append(request.url.host)
        return lying(request)

    asked: list[str] = []
    rollouts = open_rollouts(drawn_once, monkeypatch, URLS, None)

    async def main() -> list[Any]:
        return [group async for group in rollouts.generate(tiny_problems(1, 8), 3, Sampling(4))]

    (group,) = asyncio.run(main())
    assert [y.token_ids.tolist() for y in group.generations] == [[1]] * 3
    assert asked == ["a", "b"]
    counts = {"rollouts/server_failures": 0.0, "rollouts/resampled": 1.0, "rollouts/invalid_responses": 1.0}
    assert sampler_counts(rollouts) == counts
    message = "http://a returned an invalid completion: token 32 is not in the vocabulary of 32 tokens (problem '0')"
    assert capsys.readouterr().err.startswith(message)


def test_the_error_names_a_server_that_always_responds_with_invalid_completions(monkeypatch):
    rollouts = open_rollouts(lying, monkeypatch, URLS[:1], None)
    message = "http://a returned an invalid completion: token 32 is not in the vocabulary of 32 tokens."
    with pytest.raises(ServerError, match=re.escape(message)):
        collect(rollouts, tiny_problems(1, 8), 2, Sampling(4))
