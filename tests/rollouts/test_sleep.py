"""Tests servers that sleep while the trainer computes: the order of requests, and the error messages.

`test_a_server_without_memory_saver` in test_sglang.py sends the requests to a real server.
"""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from fake_servers import answer_to_get, generated, open_rollouts
from fakes import TINY_MODEL, collect, tiny_params, tiny_problems

from poly_epo_jax.config.default import get_config
from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.servers.client import ServerSampler
from poly_epo_jax.rollouts.servers.served_weights import ServedWeights
from poly_epo_jax.rollouts.sglang import dialect
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.types import Sampling, SupportsSleep

URL = "http://a"
WAKES = ["resume_memory_occupation", "update_weight_version"]
PUSHES = ["pause_generation", "update_weights_from_disk", "continue_generation"]
SLEEPS = ["pause_generation", "update_weight_version", "release_memory_occupation"]


class Server:
    """Fake SGLang server. It must not be put to sleep or woken twice, or generate while it sleeps."""

    def __init__(self, saver: bool = True, router: bool = False):
        self.version, self.calls, self.asleep, self.empty = "default", list[str](), False, False
        self.saver, self.router, self.broken = saver, router, ""

    def handle(self, request: httpx.Request) -> httpx.Response:
        endpoint = request.url.path.strip("/")
        if request.method == "GET":
            if endpoint == "workers" and self.router:
                return httpx.Response(200, json={"workers": []})
            return answer_to_get(request.url.path, weight_version=self.version, enable_memory_saver=self.saver)
        body = json.loads(request.content)
        self.calls.append(endpoint)
        if endpoint == self.broken:
            self.broken = ""
            return httpx.Response(500, json={})
        match endpoint:
            case "release_memory_occupation":
                assert not self.asleep and self.calls[-3] == "pause_generation"
                self.asleep = self.empty = True
                return httpx.Response(200)
            case "resume_memory_occupation":
                assert self.asleep
                self.asleep = False
                return httpx.Response(200)
            case "update_weights_from_disk":
                assert not self.asleep
                self.version, self.empty = body["weight_version"], False
            case "update_weight_version":
                self.version = body["new_version"]
            case "generate":
                assert not self.asleep and not self.empty
                if "return_logprob" in body:
                    return generated(request, self.version)
        return httpx.Response(
            200, json={"success": True, "meta_info": {"weight_version": self.version, "cached_tokens": 0}}
        )


def opened(server: Server, monkeypatch: pytest.MonkeyPatch, folder: Path, sleeps: bool = True) -> Rollouts:
    rollouts = open_rollouts(server.handle, monkeypatch, [URL], folder)
    assert isinstance(rollouts.sampler, ServerSampler) and isinstance(rollouts.sampler, SupportsSleep)
    assert isinstance(rollouts.sampler._weights, ServedWeights)
    rollouts.sampler._weights.sleeps = sleeps
    return rollouts


def test_a_server_sleeps_after_the_batch_and_wakes_before_the_weight_update(tmp_path: Path, monkeypatch):
    server = Server()
    rollouts = opened(server, monkeypatch, tmp_path)

    async def step(version: int) -> None:
        await rollouts.sleep()
        assert server.asleep and server.version == dialect.ASLEEP
        await rollouts.push_weights(tiny_params(version), version)

    asyncio.run(rollouts.push_weights(tiny_params(0), 0))
    assert server.calls == PUSHES
    asyncio.run(step(1))
    assert server.calls == PUSHES + SLEEPS + WAKES + PUSHES
    groups = collect(rollouts, tiny_problems(2, 8), 2, Sampling(4))
    assert {version for group in groups for y in group.generations for version in y.weight_versions} == {1}


def test_a_server_that_another_run_left_asleep_is_woken_once(tmp_path: Path, monkeypatch):
    server = Server()
    server.asleep, server.empty, server.version = True, True, dialect.ASLEEP
    rollouts = opened(server, monkeypatch, tmp_path)
    server.broken = "pause_generation"  # The update is retried on a server that is already awake.
    with pytest.raises(ServerError):
        asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    asyncio.run(rollouts.push_weights(tiny_params(2), 2))
    assert server.calls.count("resume_memory_occupation") == 1 and not server.asleep


def test_a_sleeping_server_is_woken_by_a_run_without_sleep(tmp_path: Path, monkeypatch):
    server = Server()
    server.asleep, server.empty, server.version = True, True, dialect.ASLEEP
    rollouts = opened(server, monkeypatch, tmp_path, sleeps=False)
    asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    assert server.calls == WAKES + PUSHES


@pytest.mark.parametrize("version", [dialect.ASLEEP, dialect.EMPTY])
def test_an_evaluation_rejects_a_server_without_weights(version: str, monkeypatch):
    server = Server()
    server.version = version
    rollouts = open_rollouts(server.handle, monkeypatch, [URL], None)
    with pytest.raises(ServerError, match=r"http://a has no weights.* Restart it"):
        collect(rollouts, tiny_problems(2, 8), 2, Sampling(4))
    assert server.calls == []


def test_servers_stay_awake_by_default(tmp_path: Path, monkeypatch):
    server = Server()
    rollouts = opened(server, monkeypatch, tmp_path, sleeps=False)
    asyncio.run(rollouts.sleep())
    asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    assert server.calls == PUSHES


@pytest.mark.parametrize(
    ("server", "broken", "message"),
    [
        (Server(saver=False), "", "http://a cannot release its memory; start it with --enable"),
        (Server(), "release_memory_occupation", r"http://a cannot release its memory \(500\)"),
        (Server(), "resume_memory_occupation", r"http://a cannot reallocate its memory \(500\)"),
    ],
)
def test_errors_name_the_server_and_the_failed_request(
    server: Server, broken: str, message: str, tmp_path: Path, monkeypatch
):
    rollouts = opened(server, monkeypatch, tmp_path)
    asyncio.run(rollouts.push_weights(tiny_params(0), 0))
    server.broken = broken

    async def step() -> None:
        await rollouts.sleep()
        await rollouts.push_weights(tiny_params(1), 1)

    with pytest.raises(ServerError, match=message):
        asyncio.run(step())


def test_routers_are_rejected(tmp_path: Path, monkeypatch):
    rollouts = opened(Server(router=True), monkeypatch, tmp_path)
    with pytest.raises(ServerError, match=r"list the servers themselves in rollouts.urls"):
        asyncio.run(rollouts.sleep())


def test_staleness_is_rejected():
    config = get_config()
    config.rollouts.update({"name": "sglang", "urls": URL, "options": {"sleep": True}})
    config.update_from_flattened_dict({"train.staleness": 1, "algo.importance_cap": 2.0})
    with pytest.raises(ConfigError, match=r"set train\.staleness=0"):
        SAMPLERS["sglang"].open(TINY_MODEL, make_mesh(1, 1, 1), (1,), read_config(config), sleep=True)
