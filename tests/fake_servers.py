"""SGLang's HTTP API without SGLang: a transport in memory, and answers in the form of the real ones."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import PATIENCE, TINY, TINY_ALPHABET, ByLetter

from poly_epo_jax import http_client as servers
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.sglang import client as sglang
from poly_epo_jax.rollouts.sglang import requests, router, served_weights
from poly_epo_jax.rollouts.sglang.client import SGLangSampler
from poly_epo_jax.rollouts.sglang.weight_sync import DiskSync
from poly_epo_jax.tasks.character_tokenizer import build_character_tokenizer

Handler = Callable[[httpx.Request], Any]


def open_rollouts(
    handle: Handler, monkeypatch: pytest.MonkeyPatch, urls: Sequence[str], folder: Path | None, **changes: Any
) -> Rollouts:
    """Rollouts whose every request `handle` answers; weights go through `folder`, or are left as they are."""

    def open_client(_: float) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(handle))

    for module in (servers, requests, router, served_weights, sglang):
        monkeypatch.setattr(module, "open_client", open_client)
    for module in (served_weights, sglang):
        monkeypatch.setattr(module, "backoff_seconds", lambda attempt: 0.0)
    limits = {"max_concurrent": 64, "timeout_seconds": PATIENCE, "wait_seconds": PATIENCE} | changes
    weights = None
    if folder is not None:
        weights = served_weights.ServedWeights(DiskSync(folder, "a run", TINY, "float32"), 8, PATIENCE, PATIENCE)
    sampler = SGLangSampler(urls, weights, (1, 14), **limits)
    return Rollouts(sampler, build_character_tokenizer(TINY_ALPHABET), ByLetter(), 8)


def answer_to_get(path: str, **info: Any) -> httpx.Response:
    """What an SGLang server answers to the requests that only ask."""
    status = {"/workers": 404, "/update_weights_from_disk": 405}.get(path, 200)
    return httpx.Response(status, json=info)


def generated(request: httpx.Request, version: str, reason: str = "stop", tokens: int = 1) -> httpx.Response:
    """`tokens` stop tokens for each prompt of a request."""
    info = {"weight_version": version, "finish_reason": {"type": reason}, "completion_tokens": tokens}
    info["output_token_logprobs"] = [[-1.0, 1, None]] * tokens
    answer = {"output_ids": [1] * tokens, "meta_info": info}
    parameters = json.loads(request.content)["sampling_params"]
    return httpx.Response(200, json=[answer] * len(parameters) if isinstance(parameters, list) else answer)
