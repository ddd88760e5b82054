"""Fake SGLang servers: an in-memory HTTP transport, and responses in the format of real servers."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import PATIENCE, TINY, TINY_ALPHABET, ByLetter
from simulated_time import SimulatedTime

from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.servers import client, served_weights
from poly_epo_jax.rollouts.servers.adopted_weights import AdoptedWeights
from poly_epo_jax.rollouts.servers.client import ServerSampler
from poly_epo_jax.rollouts.servers.content_check import ContentCheck
from poly_epo_jax.rollouts.servers.dialect import Dialect
from poly_epo_jax.rollouts.servers.weight_sync import DiskSync
from poly_epo_jax.rollouts.sglang.dialect import SGLANG
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.system import http_client as servers
from poly_epo_jax.types import Metrics, Params

Handler = Callable[[httpx.Request], Any]


class NoContentCheck(ContentCheck):
    """Accepts all weight updates, for servers without weights. test_content_check.py tests the verification."""

    def __init__(self) -> None:
        pass

    def prepare(self, params: Params) -> None:
        pass

    def switch(self) -> None:
        pass

    def release(self) -> None:
        pass

    def metrics(self) -> Metrics:
        return {}

    async def verify(self, client: httpx.AsyncClient, urls: Sequence[str], name: str) -> dict[str, str]:
        return {}

    async def has_weights(self, client: httpx.AsyncClient, url: str, name: str) -> bool:
        return True


UNCHECKED = NoContentCheck()


def open_rollouts(
    handle: Handler,
    monkeypatch: pytest.MonkeyPatch,
    urls: Sequence[str],
    folder: Path | None,
    wait_seconds: float = PATIENCE,
    required_weights: str | None = None,
    in_flight: bool = False,
    dialect: Dialect = SGLANG,
    time: SimulatedTime | None = None,
) -> Rollouts:
    """Returns rollouts whose HTTP requests are handled by `handle`.

    Args:
      handle: Function that maps a request to a response.
      monkeypatch: Replaces the HTTP transport and disables retry delays.
      urls: Servers and routers.
      folder: Folder through which weights are pushed. If None, the servers keep their weights.
      wait_seconds: Timeout in seconds for a server that does not respond.
      required_weights: Path and version of the weights that servers without a folder must have. If None, any weights.
      in_flight: Whether updates keep the generations in progress.
      dialect: API of the servers.
      time: Simulated time of the HTTP requests. If None, only their time limits are simulated.
    """
    time = time or SimulatedTime(monkeypatch, servers, only_limits=True)
    monkeypatch.setattr(servers, "open_transport", lambda proxy: httpx.MockTransport(handle))
    for module in (served_weights, client):
        monkeypatch.setattr(module, "backoff_seconds", lambda attempt: 0.0)
    weights = AdoptedWeights(dialect, wait_seconds, required_weights)
    if folder is not None:
        sync = DiskSync(folder, "a run", TINY, "float32")
        weights = served_weights.ServedWeights(sync, dialect, UNCHECKED, PATIENCE, wait_seconds, in_flight=in_flight)
    limits = {"vocab_size": TINY.vocab_size, "max_concurrent": 64, "timeout_seconds": PATIENCE}
    sampler = ServerSampler(urls, weights, (1, 14), **limits)
    return Rollouts(sampler, build_character_tokenizer(TINY_ALPHABET), ByLetter(), 8)


def answer_to_get(path: str, **info: Any) -> httpx.Response:
    """Returns the response of an SGLang server to a GET request."""
    status = {"/workers": 404, "/update_weights_from_disk": 405}.get(path, 200)
    return httpx.Response(status, json=info)


def generated(request: httpx.Request, version: str, reason: str = "stop", tokens: int = 1) -> httpx.Response:
    """Returns a response with `tokens` tokens, the last of which is a stop token, for each prompt of a request."""
    body = json.loads(request.content)
    is_list = isinstance(body["sampling_params"], list)
    prompt_ids = body["input_ids"][0] if is_list else body["input_ids"]
    token_ids = [2] * (tokens - 1) + [1] * min(tokens, 1)
    info = {"weight_version": version, "finish_reason": {"type": reason, "matched": 1}, "completion_tokens": tokens}
    info |= {"prompt_tokens": len(prompt_ids), "output_token_logprobs": [[-1.0, one, None] for one in token_ids]}
    answer = {"output_ids": token_ids, "meta_info": info}
    return httpx.Response(200, json=[answer] * len(body["sampling_params"]) if is_list else answer)
