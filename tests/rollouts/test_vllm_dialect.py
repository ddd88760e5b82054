"""Tests the requests to vLLM servers and their errors with a fake server. test_vllm.py uses real servers."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_servers import open_rollouts
from fakes import (
    PATIENCE,
    TINY,
    TINY_ALPHABET,
    TINY_MODEL,
    ByLetter,
    collect,
    sampler_counts,
    tiny_params,
    tiny_problems,
)
from lies import put, remove

from poly_epo_jax.config.default import get_config
from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.rollouts import SAMPLERS, model_info, open_server
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.servers.dialect import Dialect, ModelInfo
from poly_epo_jax.rollouts.vllm import VLLM, parse_response
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.system.http_client import InvalidResponseError, ServerError, open_client
from poly_epo_jax.types import Request, Sampling

URL = "http://a"
UPDATE = ["pause", "collective_rpc", "update_weight_version", "reset_prefix_cache", "resume"]
REQUEST = Request("p", np.array([3, 4]), np.arange(2, dtype=np.uint32), 3)


def completion(version: str, token_ids: list[int], reason: str = "stop") -> dict[str, Any]:
    """Returns the response of vLLM 0.32.0 to a generation request, without fields that are not read."""
    spans = [{"version": version, "start": 0, "end": len(token_ids)}] if token_ids else []
    content = [{"token_id": token, "logprob": -1.0, "rank": 1, "top_logprobs": []} for token in token_ids]
    choice = {"index": 0, "finish_reason": reason, "stop_reason": token_ids[-1] if reason == "stop" else None}
    choice |= {"token_ids": token_ids, "weight_versions": spans, "logprobs": {"content": content}}
    usage = {"prompt_tokens": 2, "completion_tokens": len(token_ids), "prompt_tokens_details": None}
    return {"usage": usage, "choices": [choice]}


class Server:
    """Fake vLLM server. Like a real one, it would terminate if it were told to load a folder that does not exist.

    Attributes:
      calls: Routes of all POST requests in order.
      answers: Responses to the next POST requests, by route.
    """

    def __init__(self) -> None:
        self.version, self.is_paused = "default", False
        self.is_dev, self.scales_out, self.vocab_size = True, True, TINY.vocab_size
        self.model = {"model": "m", "tokenizer": "t", "max_model_len": 64, "logprobs_mode": "processed_logprobs"}
        self.calls, self.bodies, self.answers = list[str](), list[Any](), dict[str, list[httpx.Response]]()

    def handle(self, request: httpx.Request) -> httpx.Response:
        route = request.url.path.strip("/")
        if request.method == "GET":
            info = {"server_info": {"vllm_config": {"model_config": self.model}}}
            info |= {"weight_info": {"weight_version": self.version}}
            if route == "health":
                return httpx.Response(200)
            return httpx.Response(200, json=info[route]) if self.is_dev else httpx.Response(404, json={"detail": ""})
        body = json.loads(request.content)
        if (rejection := self.rejection(route, body)) is not None:
            return rejection
        self.calls.append(route)
        self.bodies.append(body)
        if self.answers.get(route):
            return self.answers[route].pop(0)
        match route:
            case "pause":
                assert request.url.params["mode"] == "abort"
                self.is_paused = True
            case "collective_rpc":
                folder = Path(body["kwargs"]["weights_path"])
                assert self.is_paused and body["method"] == "reload_weights" and (folder / "config.json").is_file()
                return httpx.Response(200, json={"results": [None]})
            case "update_weight_version":
                self.version = body["new_version"]
            case "reset_prefix_cache":
                assert self.is_paused
                return httpx.Response(200, json={"success": True})
            case "resume":
                self.is_paused = False
            case "inference/v1/generate":
                assert not self.is_paused
                answer = completion(self.version, [5, 1])
                return httpx.Response(200, json=put(("usage", "prompt_tokens"), len(body["token_ids"]), answer))
        return httpx.Response(200, json={})

    def rejection(self, route: str, body: Any) -> httpx.Response | None:
        """Returns the response to a generation request that the server rejects, in the words of vLLM."""
        if route != "inference/v1/generate":
            return None
        if not self.scales_out:
            return httpx.Response(403, json={"error": {"message": "Scale-out endpoints are disabled."}})
        outside = [one for one in body["sampling_params"].get("stop_token_ids", []) if one >= self.vocab_size]
        text = f"token_id(s) {outside} in stop_token_ids contain out-of-vocab token ids. Vocabulary size: "
        return httpx.Response(400, json={"error": {"message": f"{text}{self.vocab_size} (...)"}}) if outside else None


@pytest.fixture
def server() -> Server:
    return Server()


def opened(server: Server, monkeypatch: pytest.MonkeyPatch, folder: Path | None, temperature: float = 1.0) -> Rollouts:
    dialect = VLLM(TINY.vocab_size, 64, temperature)
    assert isinstance(dialect, Dialect)
    return open_rollouts(server.handle, monkeypatch, [URL], folder, dialect=dialect)


def test_each_seed_is_a_request_and_an_update_has_a_fixed_order(server, monkeypatch, tmp_path):
    rollouts = opened(server, monkeypatch, tmp_path)
    asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    assert server.calls == UPDATE and not server.is_paused
    (group,) = collect(rollouts, tiny_problems(1, 8), 3, Sampling(4, 0.5, top_k=7))
    assert [y.token_ids.tolist() for y in group.generations] == [[5, 1]] * 3
    assert {version for y in group.generations for version in y.weight_versions} == {1}
    bodies = server.bodies[len(UPDATE) :]
    seeds = [body["sampling_params"].pop("seed") for body in bodies]
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**32 for seed in seeds)
    expected = {"max_tokens": 4, "temperature": 0.5, "top_p": 1.0, "top_k": 7, "stop_token_ids": [1, 14]}
    expected |= {"ignore_eos": True, "logprobs": 0, "detokenize": False}
    assert bodies == [{"token_ids": group.prompt_ids.tolist(), "sampling_params": expected}] * 3
    assert set(sampler_counts(rollouts).values()) == {0.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_dev": False}, "start vLLM 0.30 or newer with the environment variable VLLM_SERVER_DEV_MODE=1"),
        ({"scales_out": False}, "start it with --enable-scale-out"),
        ({"vocab_size": 33}, "a vocabulary of 33 tokens, but that of the policy has 32"),
        ({"vocab_size": 31}, "a vocabulary of 31 tokens, but that of the policy has 32"),
        ({"max_model_len": 63}, "start it with --max-model-len 64"),
        ({"logprobs_mode": "raw_logprobs"}, r"temperature=0\.5; start it with --logprobs-mode processed_logprobs"),
        ({"logprobs_mode": "raw_logits"}, "start it with --logprobs-mode processed_logprobs"),
    ],
)
def test_other_settings_are_rejected_before_weights_are_written(server, changes, message, monkeypatch, tmp_path):
    rollouts = opened(server, monkeypatch, tmp_path, temperature=0.5)
    for name, value in changes.items():
        if name in server.model:
            server.model[name] = value
        else:
            setattr(server, name, value)
    with pytest.raises(ServerError, match=f"^{URL} .*{message}"):
        asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    assert server.calls == [] and not any(tmp_path.iterdir())


def test_raw_log_probabilities_are_accepted_at_temperature_1(server, monkeypatch, tmp_path):
    server.model["logprobs_mode"] = "raw_logprobs"
    asyncio.run(opened(server, monkeypatch, tmp_path).push_weights(tiny_params(1), 1))
    assert server.calls == UPDATE


def test_a_missing_folder_is_never_sent(server, monkeypatch, tmp_path):
    opened(server, monkeypatch, tmp_path)  # Replaces the HTTP transport.
    (tmp_path / "empty").mkdir()

    async def load(folder: Path) -> None:
        async with open_client(PATIENCE) as client:
            await VLLM().load_folder(client, URL, folder, "w")

    for folder in (tmp_path / "nowhere", tmp_path / "empty"):
        with pytest.raises(FileNotFoundError, match=f"^{folder} has no weights"):
            asyncio.run(load(folder))
    assert server.calls == []


@pytest.mark.parametrize(
    ("route", "answer", "message"),
    [
        (
            "collective_rpc",
            httpx.Response(500, json={"error": "no such folder"}),
            "set rollouts.weights_dir to a folder",
        ),
        ("reset_prefix_cache", httpx.Response(200, json={"success": False}), "did not empty its prefix cache"),
        ("update_weight_version", httpx.Response(404, json={}), r"/update_weight_version failed \(404\)"),
    ],
)
def test_a_failed_update_is_not_repeated(server, route, answer, message, monkeypatch, tmp_path):
    """A server that restarts after it failed to read a folder would be terminated again."""
    rollouts = opened(server, monkeypatch, tmp_path)
    server.answers[route] = [answer]
    with pytest.raises(ServerError, match=message):
        asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    assert server.calls == UPDATE[: UPDATE.index(route) + 1]


def test_checksums_are_split_by_rank_and_quantized_servers_have_none(server, monkeypatch, tmp_path):
    opened(server, monkeypatch, tmp_path)  # Replaces the HTTP transport.
    digests = {"dp0:pp0:pcp0:tp0:norm": "ab", "dp0:pp0:pcp0:tp1:experts.routed_experts.w2_weight": "cd"}
    server.answers["weight_checker"] = [httpx.Response(200, json={"checksums": digests})]

    async def checksums() -> list[dict[str, str]] | None:
        async with open_client(PATIENCE) as client:
            return await VLLM().checksums(client, URL, ())

    assert asyncio.run(checksums()) == [{"norm": "ab"}, {"experts.w2_weight": "cd"}]
    server.model["quantization"] = "fp8"
    assert asyncio.run(checksums()) is None


def test_an_interrupted_update_is_repeated(server, monkeypatch, tmp_path):
    rollouts = opened(server, monkeypatch, tmp_path)
    server.answers["pause"] = [httpx.Response(503)]
    server.answers["resume"] = [httpx.Response(500)]
    asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    assert server.calls == ["pause", *UPDATE[:5], *UPDATE]


def test_aborted_mixed_and_invalid_completions_are_resampled(server, monkeypatch, tmp_path):
    rollouts = opened(server, monkeypatch, tmp_path)
    asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    mixed = completion(server.version, [5, 1])
    spans = [{"version": "older", "start": 0, "end": 1}, {"version": server.version, "start": 1, "end": 2}]
    put(("choices", 0, "weight_versions"), spans, mixed)
    invalid = [completion(server.version, [], "abort"), mixed, completion(server.version, [99, 1])]
    for answer in invalid:
        put(("usage", "prompt_tokens"), 1, answer)
    server.answers["inference/v1/generate"] = [httpx.Response(200, json=answer) for answer in invalid]
    (group,) = collect(rollouts, tiny_problems(1, 1), 3, Sampling(4))
    assert [y.token_ids.tolist() for y in group.generations] == [[5, 1]] * 3
    counts = {"rollouts/server_failures": 0.0, "rollouts/resampled": 3.0, "rollouts/invalid_responses": 2.0}
    assert sampler_counts(rollouts) == counts


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(400, json={"error": "too long"}), "rejected the prompt of problem '0' with 400: .*too long"),
        (
            httpx.Response(200, json=put(("usage", "prompt_tokens"), 1, completion("run-1", [5], "length"))),
            "after 1 of 4 tokens, at the end of its context; start it with a larger --max-model-len",
        ),
    ],
)
def test_a_rejected_request_raises_an_error(server, answer, message, monkeypatch, tmp_path):
    rollouts = opened(server, monkeypatch, tmp_path)
    asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    server.answers["inference/v1/generate"] = [answer]
    with pytest.raises(ServerError, match=message):
        collect(rollouts, tiny_problems(1, 1), 1, Sampling(4))


CHOICE = ("choices", 0)
LIES: dict[str, Callable[[Any], Any]] = {
    "no choice": lambda answer: put(("choices",), [], answer),
    "two choices": lambda answer: put(("choices",), answer["choices"] * 2, answer),
    "no usage": lambda answer: remove(("usage",), answer),
    "another prompt": lambda answer: put(("usage", "prompt_tokens"), 3, answer),
    "no weight versions": lambda answer: put((*CHOICE, "weight_versions"), None, answer),
    "empty weight versions": lambda answer: put((*CHOICE, "weight_versions"), [], answer),
    "a span without an end": lambda answer: remove((*CHOICE, "weight_versions", 0, "end"), answer),
    "no log-probabilities": lambda answer: put((*CHOICE, "logprobs"), None, answer),
    "one log-probability less": lambda answer: remove((*CHOICE, "logprobs", "content", 0), answer),
    "another token": lambda answer: put((*CHOICE, "token_ids", 0), 6, answer),
    "a huge token": lambda answer: put(
        (*CHOICE, "token_ids", 0), 2**40, put((*CHOICE, "logprobs", "content", 0, "token_id"), 2**40, answer)
    ),
    "no tokens": lambda answer: put((*CHOICE, "token_ids"), [], put((*CHOICE, "logprobs", "content"), [], answer)),
    "an integer log-probability": lambda answer: put((*CHOICE, "logprobs", "content", 0, "logprob"), -1, answer),
    "no stop token": lambda answer: put((*CHOICE, "stop_reason"), None, answer),
    "another stop token": lambda answer: put((*CHOICE, "stop_reason"), 5, answer),
    "an unknown reason": lambda answer: put((*CHOICE, "finish_reason"), "error", answer),
    "no object": lambda answer: [answer],
}


@pytest.mark.parametrize("name", LIES)
def test_invalid_responses_are_rejected(name: str):
    answer = completion("w", [5, 1])
    assert parse_response(answer, REQUEST).finish_reason == "stop"
    with pytest.raises(InvalidResponseError) as raised:
        parse_response(LIES[name](answer), REQUEST)
    assert str(raised.value).isprintable()


def test_the_configuration_selects_the_kind_of_server(server, monkeypatch):
    config = get_config()
    config.rollouts.update({"name": "vllm", "urls": URL})
    opened(server, monkeypatch, None)  # Replaces the HTTP transport.
    assert asyncio.run(model_info(URL, read_config(config))) == ModelInfo("m", "t", "default")
    sampler = open_server(URL, TINY_MODEL, (1, 14), read_config(config))
    rollouts = Rollouts(sampler, build_character_tokenizer(TINY_ALPHABET), ByLetter(), 8)
    (group,) = collect(rollouts, tiny_problems(1, 8), 2, Sampling(4))
    assert len(group.generations) == 2

    config.rollouts.weight_sync = "tensor"
    with pytest.raises(ConfigError, match=r"rollouts\.weight_sync='tensor' .* set rollouts\.weight_sync=disk"):
        SAMPLERS["vllm"].open(TINY_MODEL, make_mesh(1, 1, 1), (1,), read_config(config))
    config.rollouts.update({"weight_sync": "disk", "options": {"sleep": True}})
    with pytest.raises(ConfigError, match="sleep"):
        read_config(config)
