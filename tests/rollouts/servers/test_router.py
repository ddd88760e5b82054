"""Tests weight updates and prompts of workers behind a router. test_sglang.py uses a real router."""

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from fake_servers import answer_to_get, generated, open_rollouts
from fakes import PATIENCE, collect, sampler_counts, tiny_params, tiny_problems, until
from simulated_time import SimulatedTime

from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.system import http_client
from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.types import Group, Sampling

ROUTER = "http://router"
WORKERS: tuple[str, str] = ("http://a", "http://b")


class Routed:
    """Fake router with two workers. Like the real router, it forwards prompts to running workers in turn."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = dict.fromkeys(WORKERS, "default")
        self.listed: list[str] = list(WORKERS)
        self.dead: set[str] = set()
        self.served: list[tuple[str, str]] = []  # (worker, weight version) of each generation.
        self.fixed: set[str] = set()  # Workers that do not accept weights.
        self.hung: set[str] = set()  # Workers that accept requests and never answer, so that their time limits expire.
        self.time: SimulatedTime | None = None
        self.dying = ""  # Worker that terminates when it receives weights.
        self.first = ""  # Worker that must generate before the others do.
        self.waiting = 0  # Number of prompts that wait for `first`.
        self.asked = 0
        self.answers = math.inf  # Number of prompts that the router answers. Further prompts wait.

    async def handle(self, request: httpx.Request) -> httpx.Response:
        url = f"http://{request.url.host}"
        if url == ROUTER:
            return await self.route(request)
        if url in self.dead:
            raise httpx.ConnectError("dead")
        if url in self.hung:
            assert self.time is not None
            self.time.expire()
            await asyncio.Event().wait()
        if self.first and url != self.first and b"return_logprob" in request.content:
            self.waiting += 1
            await until(lambda: any(server == self.first for server, _ in self.served))
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
            if path == "/update_weights_from_disk" and url in self.fixed:
                return httpx.Response(404)
            return answer_to_get(path, weight_version=self.versions[url])
        body = json.loads(request.content)
        if path == "/update_weights_from_disk" and url == self.dying:
            self.dead.add(url)
            raise httpx.ReadError("dead")
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


async def all_groups(rollouts: Rollouts) -> list[Group]:
    return [group async for group in rollouts.generate(tiny_problems(32, 8), 4, Sampling(4))]


def test_weights_and_prompts_are_sent_to_all_workers(tmp_path: Path, monkeypatch):
    fake = Routed()
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path)
    for version in (1, 2):
        asyncio.run(rollouts.push_weights(tiny_params(version), version))
        assert {name.rpartition("-")[2] for name in fake.versions.values()} == {str(version)}
        assert len(collect(rollouts, tiny_problems(4, 8), 3, Sampling(4))) == 4
        assert_served(fake, WORKERS, str(version), 4)
    assert not fake.asked and sampler_counts(rollouts)["rollouts/server_failures"] == 0


def test_a_worker_with_other_weights_is_updated_before_it_generates(tmp_path: Path, monkeypatch):
    fake = Routed()
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path)
    asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    fake.restart(WORKERS[0])
    groups = collect(rollouts, tiny_problems(8, 8), 4, Sampling(4))
    assert {version for group in groups for y in group.generations for version in y.weight_versions} == {1}
    assert sum(version == "1" for _, version in fake.served) == 8


def test_an_added_worker_is_updated_before_it_generates(tmp_path: Path, monkeypatch):
    fake = Routed()
    fake.listed.remove(WORKERS[1])
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path)
    asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    fake.listed.append(WORKERS[1])
    fake.first = WORKERS[1]
    collect(rollouts, tiny_problems(32, 8), 4, Sampling(4))
    assert_served(fake, WORKERS, "1", 32)
    asyncio.run(rollouts.push_weights(tiny_params(2), 2))
    collect(rollouts, tiny_problems(8, 8), 4, Sampling(4))
    assert_served(fake, WORKERS, "2", 8)
    assert sampler_counts(rollouts)["rollouts/resampled"] == 0


@pytest.mark.parametrize("how", ["dead", "hung"])
def test_a_worker_that_does_not_respond_delays_neither_updates_nor_batches(how: str, tmp_path: Path, monkeypatch):
    fake = Routed()
    getattr(fake, how).add(WORKERS[1])
    time = fake.time = SimulatedTime(monkeypatch, http_client)
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path, wait_seconds=math.inf, time=fake.time)

    async def main(version: int) -> list[Group]:
        time.expired.clear()
        async with asyncio.timeout(PATIENCE):  # Waiting for the worker would never end.
            await rollouts.push_weights(tiny_params(version), version)
            assert sum(time.expired) <= 2 and time.now == before
            return await all_groups(rollouts)

    for version in (1, 2):
        before = time.now
        assert len(asyncio.run(main(version))) == 32
        assert_served(fake, WORKERS[:1], str(version), 32)
    assert fake.versions[WORKERS[1]] == "default"


@pytest.mark.parametrize("how", ["dead", "hung"])
def test_a_worker_that_responds_late_is_updated_before_it_generates(how: str, tmp_path: Path, monkeypatch):
    fake, late = Routed(), WORKERS[1]
    silent: set[str] = getattr(fake, how)
    silent.add(late)
    fake.time = SimulatedTime(monkeypatch, http_client)
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path, wait_seconds=math.inf, time=fake.time)

    async def main() -> None:
        await rollouts.push_weights(tiny_params(1), 1)
        fake.first = late  # The other worker finishes no request before this one does.
        batch = asyncio.create_task(all_groups(rollouts))
        await until(lambda: fake.waiting == 16)  # max_concurrent / generations per prompt.
        assert fake.versions[late] == "default"
        silent.clear()
        assert {version for group in await batch for y in group.generations for version in y.weight_versions} == {1}

    asyncio.run(main())
    assert_served(fake, WORKERS, "1", 32)
    assert sampler_counts(rollouts)["rollouts/resampled"] == 0


def test_an_update_continues_without_a_worker_that_terminates(tmp_path: Path, monkeypatch, capsys):
    fake = Routed()
    fake.dying = WORKERS[1]
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path)
    asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    assert "The weight update of http://a, http://b was interrupted" in capsys.readouterr().err
    collect(rollouts, tiny_problems(4, 8), 2, Sampling(4))
    assert_served(fake, WORKERS[:1], "1", 4)


@pytest.mark.parametrize(
    ("listed", "message"),
    [(list(WORKERS), "GET http://b.*does not accept connections"), ([], "lists no workers; start one")],
)
def test_an_error_without_workers_names_the_router(listed: list[str], message: str, tmp_path: Path, monkeypatch):
    fake = Routed()
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path, wait_seconds=0.0)
    asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    fake.listed, fake.dead = listed, set(WORKERS)
    with pytest.raises(ServerError, match=f"No worker of router http://router .*{message}"):
        asyncio.run(rollouts.push_weights(tiny_params(2), 2))


def test_a_batch_without_listed_workers_ends_with_an_error_that_names_the_router(tmp_path: Path, monkeypatch):
    fake = Routed()
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path, wait_seconds=0.0)
    asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    fake.listed = []
    with pytest.raises(ServerError, match="No worker of router http://router "):
        collect(rollouts, tiny_problems(4, 8), 2, Sampling(4))


def test_an_evaluation_sends_prompts_to_the_router(monkeypatch):
    """No weights are pushed."""
    fake = Routed()
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], None)
    fake.versions = dict.fromkeys(WORKERS, "")
    assert len(collect(rollouts, tiny_problems(4, 8), 2, Sampling(4))) == 4
    assert_served(fake, WORKERS, "", 8)
    assert fake.asked == 8


def test_workers_without_weight_updates_are_rejected_at_the_start(tmp_path: Path, monkeypatch):
    fake = Routed()
    fake.fixed = set(WORKERS)
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path)
    with pytest.raises(ServerError, match=r"http://a does not support weight updates.* rollouts.name=embedded"):
        asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    assert not any(tmp_path.iterdir())  # No weights were written.


def test_an_added_worker_without_weight_updates_is_not_used(tmp_path: Path, monkeypatch, capsys):
    fake = Routed()
    fake.listed.remove(WORKERS[1])
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path)
    asyncio.run(rollouts.push_weights(tiny_params(1), 1))
    fake.listed.append(WORKERS[1])
    fake.fixed.add(WORKERS[1])
    collect(rollouts, tiny_problems(32, 8), 4, Sampling(4))
    assert_served(fake, WORKERS[:1], "1", 32)
    assert "http://b does not support weight updates" in capsys.readouterr().err


def test_an_error_of_the_router_names_it(tmp_path: Path, monkeypatch):
    fake, asked = Routed(), []

    async def handle(request: httpx.Request) -> httpx.Response:
        asked.extend([request] * (request.url.path == "/workers"))
        return httpx.Response(500) if len(asked) > 1 else await fake.handle(request)

    rollouts = open_rollouts(handle, monkeypatch, [ROUTER], tmp_path)
    with pytest.raises(ServerError, match=r"router http://router: it answered 500"):
        asyncio.run(rollouts.push_weights(tiny_params(1), 1))
