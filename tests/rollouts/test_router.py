"""Workers behind a router have the current weights before they are asked; the real router is in test_sglang.py."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest
from fake_servers import answer_to_get, generated, open_rollouts
from fakes import collect, tiny_params, tiny_problems, until

from poly_epo_jax.http_client import ServerError
from poly_epo_jax.rollouts.sglang import router
from poly_epo_jax.types import Group, Sampling

ROUTER = "http://router"
WORKERS: tuple[str, str] = ("http://a", "http://b")


class Routed:
    """Two workers and a router that asks the next listed one that lives, as the real one does."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = dict.fromkeys(WORKERS, "default")
        self.listed: list[str] = list(WORKERS)
        self.dead: set[str] = set()
        self.served: list[tuple[str, str]] = []  # which worker generated, from which weights
        self.changes: list[tuple[str, str]] = []
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
        if path == "/workers":
            body = json.loads(request.content)
            assert body["model_id"] == "m"
            self.listed.append(body["url"])
            self.changes.append(("in", body["url"]))
            return httpx.Response(202, json={})
        if request.method == "DELETE":
            url = path.partition("id-of-")[2]
            self.listed.remove(url)
            self.changes.append(("out", url))
            return httpx.Response(202, json={})
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


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "WATCH_SECONDS", 0.001)


def assert_served(fake: Routed, by: Sequence[str], version: str, count: int) -> None:
    assert {url for url, _ in fake.served} == set(by) and {name for _, name in fake.served} == {version}
    assert len(fake.served) == count
    fake.served.clear()


def test_weights_go_to_every_worker_and_prompts_to_the_router(tmp_path: Path, monkeypatch):
    fake = Routed()
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path)
    for version in (1, 2):
        asyncio.run(rollouts.push_weights(tiny_params(version), {}, version))
        assert {name.rpartition("-")[2] for name in fake.versions.values()} == {str(version)}
        assert len(collect(rollouts, tiny_problems(4, 8), 3, Sampling(4))) == 4
        assert_served(fake, WORKERS, str(version), 12)
    assert not fake.changes and rollouts.metrics()["rollouts/server_failures"] == 0


def test_a_worker_with_other_weights_is_brought_to_the_present_ones_before_it_serves(tmp_path: Path, monkeypatch):
    fake = Routed()
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path)
    asyncio.run(rollouts.push_weights(tiny_params(1), {}, 1))
    fake.restart(WORKERS[0])
    collect(rollouts, tiny_problems(8, 8), 4, Sampling(4))
    assert fake.changes[0] == ("out", WORKERS[0])
    assert {version for _, version in fake.served} == {"1"} and len(fake.served) == 32


def test_a_worker_that_dies_is_out_until_it_is_back_with_the_present_weights(tmp_path: Path, monkeypatch, capsys):
    """The router asks another by itself: no prompt tells that the worker is gone."""
    fake = Routed()

    async def main() -> None:
        rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path, max_concurrent=2)
        await rollouts.push_weights(tiny_params(1), {}, 1)
        fake.answers = 20
        generating = asyncio.create_task(count_groups(rollouts.generate(tiny_problems(30, 8), 2, Sampling(4))))
        await until(lambda: len(fake.served) == 20)
        fake.dead.add(WORKERS[0])
        fake.answers = 40
        await until(lambda: len(fake.served) == 40 and len(fake.changes) == 1)
        fake.restart(WORKERS[0])
        await until(lambda: len(fake.changes) == 2)
        fake.answers = math.inf
        assert await generating == 30 and rollouts.metrics()["rollouts/server_failures"] == 1

    asyncio.run(main())
    assert fake.changes == [("out", WORKERS[0]), ("in", WORKERS[0])]
    served = [{url for url, _ in fake.served[start : start + 20]} for start in (0, 20, 40)]
    assert served == [set(WORKERS), {WORKERS[1]}, set(WORKERS)]
    assert_served(fake, WORKERS, "1", 60)
    assert f"The worker {WORKERS[0]} is back behind the router" in capsys.readouterr().err


async def count_groups(groups: AsyncIterator[Group]) -> int:
    return len([group async for group in groups])


def test_a_worker_that_is_still_dead_when_the_batch_ends_is_put_back_by_the_next_update(tmp_path: Path, monkeypatch):
    fake = Routed()

    async def main() -> None:
        rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path)
        await rollouts.push_weights(tiny_params(1), {}, 1)
        fake.dead.add(WORKERS[1])
        assert len([group async for group in rollouts.generate(tiny_problems(4, 8), 2, Sampling(4))]) == 4
        assert fake.listed == [WORKERS[0]]
        assert_served(fake, WORKERS[:1], "1", 8)
        fake.restart(WORKERS[1])
        await rollouts.push_weights(tiny_params(2), {}, 2)
        assert sorted(fake.listed) == list(WORKERS)
        assert len([group async for group in rollouts.generate(tiny_problems(4, 8), 2, Sampling(4))]) == 4
        assert_served(fake, WORKERS, "2", 8)

    asyncio.run(main())


def test_a_run_that_ends_leaves_the_router_with_its_workers(tmp_path: Path, monkeypatch):
    fake = Routed()
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path)
    asyncio.run(rollouts.push_weights(tiny_params(1), {}, 1))
    fake.dead.add(WORKERS[1])
    collect(rollouts, tiny_problems(2, 8), 2, Sampling(4))
    assert fake.listed == [WORKERS[0]]
    rollouts.sampler.close()
    assert fake.changes == [("out", WORKERS[1]), ("in", WORKERS[1])] and sorted(fake.listed) == list(WORKERS)


def test_a_router_is_evaluated_as_it_is(monkeypatch):
    """Nobody is taken out, and no weights are sent."""
    fake = Routed()
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], None)
    fake.versions = dict.fromkeys(WORKERS, "")
    assert len(collect(rollouts, tiny_problems(4, 8), 2, Sampling(4))) == 4
    assert_served(fake, WORKERS, "", 8)
    assert not fake.changes


def test_a_worker_that_takes_no_weights_is_refused_at_the_start(tmp_path: Path, monkeypatch):
    fake = Routed()
    fake.takes_weights = False
    rollouts = open_rollouts(fake.handle, monkeypatch, [ROUTER], tmp_path)
    with pytest.raises(ServerError, match=r"http://a has no /update_weights_from_disk .* rollouts.name=embedded"):
        asyncio.run(rollouts.push_weights(tiny_params(1), {}, 1))
    assert not any(tmp_path.iterdir())  # no weights were written


def test_a_router_in_trouble_is_named(tmp_path: Path, monkeypatch):
    async def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(500) if request.method == "DELETE" else await fake.handle(request)

    fake = Routed()
    rollouts = open_rollouts(handle, monkeypatch, [ROUTER], tmp_path)
    asyncio.run(rollouts.push_weights(tiny_params(1), {}, 1))
    fake.restart(WORKERS[0])
    with pytest.raises(
        ServerError, match=r"The router http://router is in trouble: DELETE /workers/.*: it answered 500"
    ):
        collect(rollouts, tiny_problems(2, 8), 2, Sampling(4))
