"""Workers behind a router have the current weights before they are asked; the real router is in test_sglang.py."""

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from fake_servers import answer_to_get, generated, open_rollouts
from fakes import collect, tiny_params, tiny_problems, until

from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.types import Sampling

ROUTER = "http://router"
WORKERS: tuple[str, str] = ("http://a", "http://b")


class Routed:
    """Two workers and a router that asks the next listed one that lives, as the real one does."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = dict.fromkeys(WORKERS, "default")
        self.listed: list[str] = list(WORKERS)
        self.dead: set[str] = set()
        self.served: list[tuple[str, str]] = []  # which worker generated, from which weights
        self.takes_weights = True
        self.asked = 0
        self.answers = math.inf  # to how many prompts; the others wait

    async def handle(self, request: httpx.Request) -> httpx.Response:
        url = f"http://{request.url.host}"
        if url == ROUTER:
            return await self.route(request)
        if url in self.dead:
            raise httpx.ConnectError("dead")
        return self.serve(url, request)

    async def route(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/workers" and request.method == "GET":
            workers = [{"id": f"id-of-{url}", "url": url, "model_id": "m"} for url in self.listed]
            return httpx.Response(200, json={"workers": workers})
        if path == "/generate":
            assert not isinstance(json.loads(request.content)["sampling_params"], list)
            self.asked += 1
            number = self.asked
            await until(lambda: number <= self.answers)
            alive = [url for url in self.listed if url not in self.dead]
            return self.serve(alive[number % len(alive)], request) if alive else httpx.Response(503)
        if path in ("/readiness", "/v1/models") and not self.listed:
            return httpx.Response(503)
        return httpx.Response(404 if path == "/update_weights_from_disk" else 200, json={})

    def serve(self, url: str, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if request.method == "GET":
            if path == "/update_weights_from_disk" and not self.takes_weights:
                return httpx.Response(404)
            return answer_to_get(path, weight_version=self.versions[url])
        body = json.loads(request.content)
        if path == "/update_weights_from_disk":
            self.versions[url] = body["weight_version"]
        if path == "/generate" and "return_logprob" in body:
            self.served.append((url, self.versions[url].rpartition("-")[2]))
            return generated(request, self.versions[url])
        info = {"weight_version": self.versions[url], "cached_tokens": 0}
        return httpx.Response(200, json={"success": True, "meta_info": info})

    def restart(self, url: str) -> None:
        self.dead.discard(url)
        self.versions[url] = "default"


def assert_served(fake: Routed, by: Sequence[str], version: str, count: int) -> None:
    assert {url for url, _ in fake.served} == set(by) and {name for _, name in fake.served} == {version}
    assert len(fake.served) == count
    fake.served.clear()


def test_weights_and_prompts_go_to_every_worker(tmp_path: Path, monkeypatch):
    fake = Routed()
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path)
    for version in (1, 2):
        asyncio.run(rollouts.push_weights(tiny_params(version), version))
        assert {name.rpartition("-")[2] for name in fake.versions.values()} == {str(version)}
        assert len(collect(rollouts, tiny_problems(4, 8), 3, Sampling(4))) == 4
        assert_served(fake, WORKERS, str(version), 4)
    assert not fake.asked and rollouts.metrics()["rollouts/server_failures"] == 0


def test_a_worker_with_other_weights_is_brought_to_the_present_ones_before_it_serves(tmp_path: Path, monkeypatch):
    fake = Routed()
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path)
    asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    fake.restart(WORKERS[0])
    groups = collect(rollouts, tiny_problems(8, 8), 4, Sampling(4))
    assert {y.weight_version for group in groups for y in group.generations} == {1}
    assert sum(version == "1" for _, version in fake.served) == 8


def test_a_worker_that_joins_the_router_has_the_weights_before_it_counts(tmp_path: Path, monkeypatch):
    fake = Routed()
    fake.listed.remove(WORKERS[1])
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path)
    asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    fake.listed.append(WORKERS[1])
    groups = collect(rollouts, tiny_problems(8, 8), 4, Sampling(4))
    assert {y.weight_version for group in groups for y in group.generations} == {1}
    assert sum(version == "1" for _, version in fake.served) == 8


def test_a_router_is_evaluated_as_it_is(monkeypatch):
    """It is given the prompts itself, and no weights are sent."""
    fake = Routed()
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], None)
    fake.versions = dict.fromkeys(WORKERS, "")
    assert len(collect(rollouts, tiny_problems(4, 8), 2, Sampling(4))) == 4
    assert_served(fake, WORKERS, "", 8)
    assert fake.asked == 8


def test_a_worker_that_takes_no_weights_is_refused_at_the_start(tmp_path: Path, monkeypatch):
    fake = Routed()
    fake.takes_weights = False
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path)
    with pytest.raises(ServerError, match=r"http://a has no /update_weights_from_disk .* rollouts.name=embedded"):
        asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    assert not any(tmp_path.iterdir())  # no weights were written


def test_a_router_in_trouble_is_named(tmp_path: Path, monkeypatch):
    fake, asked = Routed(), []

    async def handle(request: httpx.Request) -> httpx.Response:
        asked.extend([request] * (request.url.path == "/workers"))
        return httpx.Response(500) if len(asked) > 1 else await fake.handle(request)

    rollouts = open_rollouts(handle, monkeypatch, [ROUTER], tmp_path)
    with pytest.raises(ServerError, match=r"router http://router .*answered 500"):
        asyncio.run(rollouts.push_weights(tiny_params(1), 1))
