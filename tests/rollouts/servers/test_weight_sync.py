"""Tests the order of weight updates, generations and restarts of servers. test_sglang.py uses real servers."""

import asyncio
import json
import secrets
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fake_servers import UNCHECKED, answer_to_get, generated, open_rollouts
from fakes import PATIENCE, TINY, TINY_ALPHABET, ByLetter, tiny_params, tiny_problems, until

from poly_epo_jax.records.timeline import BusyTime
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.servers import endpoints
from poly_epo_jax.rollouts.servers.client import ServerSampler
from poly_epo_jax.rollouts.servers.served_weights import ServedWeights
from poly_epo_jax.rollouts.sglang.dialect import SGLANG
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.types import Group, Sampling

URLS = ["http://a", "http://b"]


class Servers:
    """Fake servers that load any existing folder, and generate one token as soon as `may_end` is set."""

    def __init__(self) -> None:
        self.versions = dict.fromkeys(URLS, "default")
        self.loaded: list[tuple[str, str]] = []
        self.happened: list[str] = []  # Completed generations and loaded weights, in order.
        self.looks = Counter[str]()  # Number of queries of the weight version, by server.
        self.held: list[str] = []  # Failed servers with a pending health check.
        self.asked, self.may_end, self.may_answer = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.dying = ""
        self.paused: set[str] = set()
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def handle(self, request: httpx.Request) -> httpx.Response:
        url, endpoint = f"http://{request.url.host}", request.url.path.strip("/")
        body = json.loads(request.content) if request.content else {}
        if request.method == "GET":
            self.looks[url] += request.url.path == "/model_info"
            if self.dying == url:
                self.held.append(url)
                try:
                    await self.may_answer.wait()
                finally:
                    self.held.remove(url)
            return answer_to_get(request.url.path, weight_version=self.versions[url])
        if endpoint == "update_weights_from_disk":
            assert (Path(body["model_path"]) / "model.safetensors").is_file()
            self.versions[url] = body["weight_version"]
            self.loaded.append((url, body["weight_version"].split("-")[1]))
            self.happened.append(f"loaded {self.loaded[-1][1]}")
            await self.may_load.wait()
        if endpoint == "pause_generation":
            self.paused.add(url)
        if endpoint == "continue_generation":
            self.paused.discard(url)
        if endpoint == "generate" and "return_logprob" in body:
            self.asked.set()
            if self.dying == url:
                self.versions[url] = "default"  # The version that it was started with.
                raise httpx.ConnectError("dead")
            version = self.versions[url]
            await until(lambda: url not in self.paused)
            await self.may_end.wait()
            self.happened.append("answered")
            return generated(request, version)
        meta = {"weight_version": self.versions[url], "cached_tokens": 0}
        return httpx.Response(200, json={"success": True, "meta_info": meta})


def on_disk(folder: Path) -> list[str]:
    return sorted(one.name.split("-")[1] for one in folder.glob("*/*"))


async def generate(rollouts: Rollouts) -> list[Group]:
    return [group async for group in rollouts.generate(tiny_problems(4, 8), 2, Sampling(4))]


def versions(groups: list[Group]) -> set[int]:
    return {version for group in groups for y in group.generations for version in y.weight_versions}


def test_weights_are_written_during_generations_and_pushed_after_them(tmp_path: Path, monkeypatch, now: list[float]):
    async def main() -> None:
        fake = Servers()
        rollouts, busy = open_rollouts(fake.handle, monkeypatch, URLS, tmp_path), BusyTime()
        await rollouts.push_weights(tiny_params(1), 1)
        assert on_disk(tmp_path) == ["1"]

        def stands_still() -> bool:
            before, now[0] = busy.seconds(), now[0] + 1
            return busy.seconds() == before

        async def update() -> None:
            with busy.work():
                await rollouts.push_weights(tiny_params(2), 2)

        generating = asyncio.create_task(generate(rollouts))
        await fake.asked.wait()
        updating = asyncio.create_task(update())
        await until(lambda: on_disk(tmp_path) == ["1", "2"])
        await until(stands_still)  # Waiting for generations does not count as update time.
        before, now[0] = busy.seconds(), now[0] + 100
        fake.may_end.set()
        assert versions(await generating) == {1}
        await updating
        assert fake.happened == ["loaded 1"] * 2 + ["answered"] * 4 + ["loaded 2"] * 2
        assert sorted(fake.loaded[2:]) == [(url, "2") for url in URLS]
        assert on_disk(tmp_path) == ["2"]
        assert busy.seconds() == before
        assert versions(await generate(rollouts)) == {2}

    asyncio.run(main())


async def lost_in_a_batch(fake: Servers, rollouts: Rollouts) -> tuple[asyncio.Task, asyncio.Task]:
    """Starts a batch with weights 1 in which server a fails, and an update to weights 2 that waits for the batch."""
    await rollouts.push_weights(tiny_params(1), 1)
    fake.dying = "http://a"
    generating = asyncio.create_task(generate(rollouts))
    await until(lambda: fake.versions["http://a"] == "default")
    return generating, asyncio.create_task(rollouts.push_weights(tiny_params(2), 2))


def test_a_server_that_recovers_during_a_batch_gets_the_weights_of_the_batch(tmp_path: Path, monkeypatch, capsys):
    async def main() -> None:
        fake = Servers()
        generating, updating = await lost_in_a_batch(fake, open_rollouts(fake.handle, monkeypatch, URLS, tmp_path))
        await until(lambda: on_disk(tmp_path) == ["1", "2"])
        fake.dying = ""
        fake.may_answer.set()
        await until(lambda: fake.versions["http://a"] != "default")
        assert fake.loaded[2:] == [("http://a", "1")] and not updating.done()
        assert on_disk(tmp_path) == ["1", "2"]
        # The server has recovered when it has been verified, not as soon as it has loaded the weights.
        await until(lambda: "Server http://a has recovered" in capsys.readouterr().err)
        fake.may_end.set()
        assert versions(await generating) == {1}
        await updating
        assert sorted(fake.loaded[3:]) == [(url, "2") for url in URLS]
        assert on_disk(tmp_path) == ["2"]

    asyncio.run(main())


def test_a_server_that_recovers_after_the_batch_gets_only_the_new_weights(tmp_path: Path, monkeypatch):
    async def main() -> None:
        fake = Servers()
        generating, updating = await lost_in_a_batch(fake, open_rollouts(fake.handle, monkeypatch, URLS, tmp_path))
        fake.may_end.set()
        assert versions(await generating) == {1}
        await until(lambda: fake.held == ["http://a"])  # By the update: the recovery has been cancelled.
        assert not updating.done() and fake.loaded[2:] == [] and on_disk(tmp_path) == ["1", "2"]
        fake.dying = ""
        fake.may_answer.set()
        await updating
        assert sorted(fake.loaded[2:]) == [(url, "2") for url in URLS]
        assert on_disk(tmp_path) == ["2"]

    asyncio.run(main())


def test_a_push_that_the_end_of_a_batch_interrupted_is_repeated(tmp_path: Path, monkeypatch):
    """The server remains paused, although it reports the current weight version."""

    async def main() -> None:
        fake = Servers()
        rollouts = open_rollouts(fake.handle, monkeypatch, URLS, tmp_path)
        await rollouts.push_weights(tiny_params(1), 1)
        fake.dying = "http://a"
        generating = asyncio.create_task(generate(rollouts))
        await until(lambda: fake.versions["http://a"] == "default")
        fake.may_load.clear()
        fake.dying = ""
        fake.may_answer.set()
        await until(lambda: fake.loaded[2:] == [("http://a", "1")])
        fake.may_end.set()
        assert versions(await generating) == {1}
        assert fake.paused == {"http://a"} and fake.versions["http://a"] == fake.versions["http://b"]
        fake.may_load.set()
        fake.may_end.clear()
        generating = asyncio.create_task(generate(rollouts))
        await until(lambda: fake.loaded[3:] == [("http://a", "1")] and not fake.paused)
        fake.may_end.set()
        assert versions(await generating) == {1}

    asyncio.run(main())


def test_one_of_two_processes_with_shared_servers_pushes_the_weights(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(secrets, "token_hex", lambda _: "run")  # Both processes use the same name.
    monkeypatch.setattr(endpoints, "POLL_INTERVAL_SECONDS", 0.001)
    seconds = [0.0]
    monkeypatch.setattr(endpoints, "time", SimpleNamespace(monotonic=lambda: seconds[0]))

    async def main() -> None:
        fake = Servers()
        fake.may_end.set()
        first = open_rollouts(fake.handle, monkeypatch, URLS, tmp_path)
        limits = {"vocab_size": TINY.vocab_size, "max_concurrent": 64, "timeout_seconds": PATIENCE}
        sampler = ServerSampler(URLS, ServedWeights(None, SGLANG, UNCHECKED, PATIENCE, PATIENCE), (1, 14), **limits)
        second = Rollouts(sampler, build_character_tokenizer(TINY_ALPHABET), ByLetter(), 8)

        async def begin(version: int) -> asyncio.Task[list[Group]]:
            """Starts a batch of the second process, and waits until it has queried both servers without success."""
            await second.push_weights(tiny_params(version), version)
            fake.looks.clear()
            task = asyncio.create_task(generate(second))
            await until(lambda: min(fake.looks[url] for url in URLS) > 1)
            assert not task.done()
            return task

        waiting = await begin(1)
        seconds[0] = PATIENCE + 1
        with pytest.raises(ServerError, match=rf"did not push weights run-1 to http://[ab] within {PATIENCE:g} s"):
            async with asyncio.timeout(PATIENCE):
                await waiting
        for version in (1, 2):
            waiting = await begin(version)
            await first.push_weights(tiny_params(version), version)
            assert versions(await waiting) == versions(await generate(first)) == {version}
        assert sorted(fake.loaded) == sorted((url, version) for url in URLS for version in ("1", "2"))

    asyncio.run(main())
