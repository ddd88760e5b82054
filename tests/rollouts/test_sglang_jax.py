"""Tests a fake server that responds like sglang-jax 0.1.0rc0. It can be evaluated, but not used for training."""

import asyncio
import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from fake_servers import open_rollouts
from fakes import collect, tiny_params, tiny_problems

from poly_epo_jax.rollouts.servers.dialect import ModelInfo
from poly_epo_jax.rollouts.sglang.dialect import SGLANG
from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.types import Sampling

URL = "http://jax"
IDS = [5, 0, 0, 7, 14]  # Includes pad tokens and the stop token.
EARLIER = [5, 0]
INFO = {"model_path": "m", "tokenizer_path": "t", "is_generation": True, "preferred_sampling_params": None}


def answer(request: httpx.Request) -> httpx.Response:
    """Responds without special and stop tokens in output_ids, with repeated entries, and without a weight version."""
    paths = {"/get_model_info": INFO, "/v1/models": {"object": "list", "data": []}}
    if request.method == "GET":
        path = request.url.path
        return httpx.Response(200, json=paths[path]) if path in paths else httpx.Response(404, json={"detail": ""})
    assert request.url.path == "/generate"
    logprobs = [[-float(token), token, "x"] for token in EARLIER + IDS]
    info = {"finish_reason": {"type": "stop", "matched": 14}, "completion_tokens": len(IDS), "cached_tokens": 0}
    info["prompt_tokens"] = 1
    one = {"text": "", "output_ids": [5, 7], "meta_info": info | {"output_token_logprobs": logprobs}}
    return httpx.Response(200, json=[one] * len(json.loads(request.content)["sampling_params"]))


def test_generations_are_parsed_completely(monkeypatch):
    rollouts = open_rollouts(answer, monkeypatch, [URL], None)
    (group,) = collect(rollouts, tiny_problems(1, 8), 3, Sampling(8))
    assert len(group.generations) == 3
    for y in group.generations:
        np.testing.assert_array_equal(y.token_ids, IDS)
        np.testing.assert_array_equal(y.logprobs, [-token for token in IDS])
        assert y.finish_reason == "stop"
    assert asyncio.run(SGLANG.model_info(URL)) == ModelInfo("m", "t", "")


def test_training_is_rejected_before_weights_are_written(tmp_path: Path, monkeypatch):
    rollouts = open_rollouts(answer, monkeypatch, [URL], tmp_path)
    with pytest.raises(ServerError, match=r"http://jax does not support weight updates.* rollouts.name=embedded"):
        asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    assert not any(tmp_path.iterdir())
