"""Tests SGLang rollouts with real servers: generations, weight updates and failures."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest
from fake_servers import UNCHECKED
from fakes import (
    TINY,
    TINY_ALPHABET,
    TINY_MODEL,
    ByLetter,
    assert_exact_versions,
    collect,
    sampler_counts,
    tiny_params,
    tiny_problems,
    trainer_logprobs,
)
from sglang_servers import STARTED_WITHIN, Router, SGLangServer, require_sglang, require_torch, running

from poly_epo_jax.model import hf
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.servers.client import ServerSampler
from poly_epo_jax.rollouts.servers.content_check import ContentCheck
from poly_epo_jax.rollouts.servers.served_weights import ServedWeights
from poly_epo_jax.rollouts.servers.weight_reference import WeightReference
from poly_epo_jax.rollouts.servers.weight_sync import DiskSync, WeightSync
from poly_epo_jax.rollouts.sglang import dialect
from poly_epo_jax.rollouts.sglang.dialect import SGLANG
from poly_epo_jax.rollouts.sglang.tensor_sync import TensorSync
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.system.http_client import ServerError, open_client
from poly_epo_jax.types import Group, HasMetrics, Params, Problem, Sampler, Sampling

pytestmark = pytest.mark.slow

TOKENIZER = build_character_tokenizer(TINY_ALPHABET)
STOP_IDS = (1, 14)
MAX_PROMPT = 8
COUNTS = dict.fromkeys(["rollouts/server_failures", "rollouts/resampled", "rollouts/invalid_responses"], 0.0)
COUNTS |= {"rollouts/rejected_updates": 0.0}
FLAGS = ("--max-total-tokens", "16384", "--max-running-requests", "32", "--context-length", "512")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model with which the servers start. Its weights have no version."""
    require_sglang()
    folder = tmp_path_factory.mktemp("sglang") / "model"
    hf.save_pretrained(folder, tiny_params(9), TINY, dtype="float32", eos_token_id=1)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def servers(model: Path) -> Iterator[list[SGLangServer]]:
    started = [SGLangServer(model, model.with_name(f"server-{i}.log"), *FLAGS) for i in range(2)]
    with running(started):
        yield started


@pytest.fixture(params=["disk", "tensor"])
def sync(request: pytest.FixtureRequest, tmp_path: Path) -> WeightSync:
    if request.param == "disk":
        return DiskSync(tmp_path, "a run", TINY, "float32")
    require_torch()
    return TensorSync(TINY, "float32", tensor_parallel=1)


def rollouts_of(
    servers: Sequence[SGLangServer],
    sync: WeightSync,
    stop_ids: Sequence[int] = STOP_IDS,
    max_concurrent: int = 64,
    check: ContentCheck | None = None,
    in_flight: bool = False,
) -> Rollouts:
    reference = WeightReference(TINY_MODEL, make_mesh(1, 1, 1), "float32")
    check = check or ContentCheck(SGLANG, reference, 64, TINY.vocab_size, stop_ids, in_flight=in_flight)
    weights = ServedWeights(sync, SGLANG, check, STARTED_WITHIN, STARTED_WITHIN, in_flight=in_flight)
    limits = {"vocab_size": TINY.vocab_size, "max_concurrent": max_concurrent, "timeout_seconds": STARTED_WITHIN}
    sampler = ServerSampler([one.url for one in servers], weights, stop_ids, **limits)
    return Rollouts(sampler, TOKENIZER, ByLetter(), MAX_PROMPT)


def weights(seed: int) -> Params:
    return jax.device_put(tiny_params(seed))


def assert_generated_by(seed: int, groups: Sequence[Group], version: int, temperature: float = 1.0) -> None:
    trainer, sampler = trainer_logprobs(seed, groups, temperature)
    assert len(trainer) > 50 and trainer.std() > 0.5
    np.testing.assert_allclose(sampler, trainer, rtol=0, atol=1e-4)
    assert {version for group in groups for y in group.generations for version in y.weight_versions} == {version}


def assert_complete(groups: Sequence[Group], problems: Sequence[Problem], num_generations: int) -> None:
    """Asserts that each problem has one group, with complete generations."""
    assert sorted(group.problem.id for group in groups) == sorted(problem.id for problem in problems)
    for group in groups:
        assert len(group.generations) == num_generations
        assert all(len(y.token_ids) == len(y.logprobs) for y in group.generations)


@pytest.mark.parametrize(("sync", "temperature"), [("disk", 1.0), ("tensor", 0.7)], indirect=["sync"])
def test_generations_match_the_trainer(servers, sync, temperature):
    rollouts, problems = rollouts_of(servers, sync), tiny_problems(12, MAX_PROMPT)
    assert isinstance(rollouts.sampler, Sampler) and isinstance(rollouts.sampler, HasMetrics)
    asyncio.run(rollouts.push_weights(weights(1), 3))
    groups = collect(rollouts, problems, 4, Sampling(24, temperature))
    assert_complete(groups, problems, 4)
    assert_generated_by(1, groups, version=3, temperature=temperature)
    generations = [y for group in groups for y in group.generations]
    assert {y.finish_reason for y in generations} == {"stop", "length"}
    for y in generations:
        stopped = y.finish_reason == "stop"
        assert stopped == (y.token_ids[-1] in STOP_IDS) and not np.isin(y.token_ids[:-1], STOP_IDS).any()
        assert y.text == TOKENIZER.decode(y.token_ids[:-1] if stopped else y.token_ids)
        assert stopped or len(y.token_ids) == 24
    assert COUNTS.items() <= sampler_counts(rollouts).items()


def test_every_update_reaches_every_server(servers, sync, capsys):
    rollouts, problems = rollouts_of(servers, sync), tiny_problems(12, MAX_PROMPT)
    for version in (1, 2, 3):
        asyncio.run(rollouts.push_weights(weights(version), version))
        counts = sampler_counts(rollouts)
        assert counts["rollouts/bytes_proofs"] == counts["rollouts/trainer_proofs"] == 2
        assert counts["rollouts/change_proofs"] == (2 if version > 1 else 0)
        for server in servers:
            groups = collect(rollouts_on(server, rollouts), problems[:6], 4, Sampling(16))
            assert_generated_by(version, groups, version)
    # On CPUs, SGLang pads the projections of an MLP with 24 units.
    assert "checksums of 18 tensors (14 equal the pushed bytes)" in capsys.readouterr().err


def test_running_generations_continue_with_new_weights(servers, sync):
    """Servers compute keys and values of the previous tokens again, with the new weights."""
    rollouts, problems = rollouts_of(servers, sync, in_flight=True), tiny_problems(24, MAX_PROMPT)

    async def main() -> tuple[list[Group], int]:
        await rollouts.push_weights(weights(1), 1)
        version, generating = 1, asyncio.create_task(generate(rollouts, problems, 16, Sampling(200)))
        while not generating.done():
            version += 1
            await rollouts.push_weights(weights(version), version)
        return await generating, version

    groups, version = asyncio.run(main())
    assert_complete(groups, problems, 16)
    assert len(assert_exact_versions(groups)) > 1
    assert max(len(set(y.weight_versions)) for group in groups for y in group.generations) > 1
    assert COUNTS.items() <= sampler_counts(rollouts).items()
    # The prefix cache of running generations is not read after an update.
    assert assert_exact_versions(collect(rollouts, problems, 4, Sampling(16))) == {version}


async def generate(rollouts: Rollouts, problems: Sequence[Problem], count: int, sampling: Sampling) -> list[Group]:
    return [group async for group in rollouts.generate(problems, count, sampling)]


def rollouts_on(server: SGLangServer, rollouts: Rollouts) -> Rollouts:
    """Returns the same client with a single server."""
    sampler = object.__new__(ServerSampler)
    sampler.__dict__ = rollouts.sampler.__dict__ | {"urls": [server.url]}
    return Rollouts(sampler, TOKENIZER, ByLetter(), MAX_PROMPT)


def test_a_cache_of_older_weights_is_detected(servers, tmp_path, monkeypatch):
    """Without the flush, tokens after a cached prompt would be generated with keys and values of the old weights."""
    rollouts, problems = rollouts_of(servers[:1], DiskSync(tmp_path, "a run", TINY, "float32")), tiny_problems(8, 8)[7:]
    sampling = Sampling(24)
    asyncio.run(rollouts.push_weights(weights(1), 1))
    collect(rollouts, problems, 8, sampling)

    send = dialect.post

    async def without_flush(client, url, endpoint, body):
        return await send(client, url, endpoint, body | {"flush_cache": False} if "flush_cache" in body else body)

    with monkeypatch.context() as patch:
        patch.setattr(dialect, "post", without_flush)
        with pytest.raises(ServerError, match="its prefix cache contains keys and values of other weights"):
            asyncio.run(rollouts.push_weights(weights(2), 2))

        rollouts = rollouts_of(servers[:1], DiskSync(tmp_path, "a run", TINY, "float32"), check=UNCHECKED)
        asyncio.run(rollouts.push_weights(weights(2), 2))
        trainer, sampler = trainer_logprobs(2, collect(rollouts, problems, 8, sampling), 1.0)
        assert np.abs(trainer - sampler).max() > 0.01  # The stale cache changes the results.

    rollouts = rollouts_of(servers[:1], DiskSync(tmp_path, "a run", TINY, "float32"))
    asyncio.run(rollouts.push_weights(weights(2), 3))
    assert_generated_by(2, collect(rollouts, problems, 8, sampling), version=3)


def test_generations_with_weights_of_another_run_are_rejected(servers, tmp_path):
    mine = rollouts_of(servers[:1], DiskSync(tmp_path, "mine", TINY, "float32"))
    theirs = rollouts_of(servers[:1], DiskSync(tmp_path, "theirs", TINY, "float32"))
    asyncio.run(mine.push_weights(weights(1), 1))
    asyncio.run(theirs.push_weights(weights(2), 1))
    problems = tiny_problems(4, MAX_PROMPT)
    groups = collect(mine, problems, 4, Sampling(16))
    assert_complete(groups, problems, 4)
    assert_generated_by(1, groups, version=1)
    counts = sampler_counts(mine)
    assert counts["rollouts/resampled"] > 0 and counts["rollouts/server_failures"] > 0


def test_partial_generations_are_resampled(servers, tmp_path):
    rollouts = rollouts_of(servers[:1], DiskSync(tmp_path, "a run", TINY, "float32"), stop_ids=(1,))
    asyncio.run(rollouts.push_weights(weights(1), 1))
    problems, url = tiny_problems(8, MAX_PROMPT), servers[0].url

    def abort() -> None:
        deadline = time.monotonic() + STARTED_WITHIN
        while not httpx.get(f"{url}/v1/loads").json()["loads"][0]["num_running_reqs"]:
            assert time.monotonic() < deadline
        httpx.post(f"{url}/abort_request", json={"abort_all": True}).raise_for_status()

    with ThreadPoolExecutor(1) as executor:
        aborted = executor.submit(abort)
        groups = collect(rollouts, problems, 4, Sampling(400))
        aborted.result()
    assert_complete(groups, problems, 4)
    assert all(len(y.token_ids) == 400 or y.finish_reason == "stop" for g in groups for y in g.generations)
    assert sampler_counts(rollouts)["rollouts/resampled"] > 0


def collect_over_a_restart(
    rollouts: Rollouts, problems: Sequence[Problem], servers: Sequence[SGLangServer]
) -> list[Group]:
    """Returns all groups. After two groups, the second server is killed and restarted while the first is paused."""
    held, dying = servers
    asked: list[str] = []

    def kill() -> None:
        httpx.post(f"{held.url}/pause_generation", json={"mode": "retract"}).raise_for_status()
        dying.kill()
        asked.extend(dying.requests())

    def restart() -> None:
        dying.start()
        deadline = time.monotonic() + STARTED_WITHIN
        while len(dying.requests()) < len(asked) + 6:  # Pause, load, continue, and three requests that verify.
            assert time.monotonic() < deadline
            time.sleep(0.2)
        httpx.post(f"{held.url}/continue_generation", json={}).raise_for_status()

    async def main() -> list[Group]:
        groups, action = [], None
        async for group in rollouts.generate(problems, 4, Sampling(300)):
            groups.append(group)
            if len(groups) == 2:
                kill()  # Blocks the event loop, so that most of the problems are still pending.
                action = asyncio.create_task(asyncio.to_thread(restart))
        assert action is not None
        await action
        return groups

    groups = asyncio.run(main())
    # The restarted server received the current weights before its first prompt.
    since = dying.requests()[len(asked) :]
    assert since[:2] == ["pause_generation", "update_weights_from_disk"] and since.count("generate") > 4
    return groups


def test_a_server_that_restarts_during_a_batch_is_updated_before_it_generates(servers, tmp_path, capsys):
    sync, problems = DiskSync(tmp_path, "a run", TINY, "float32"), tiny_problems(24, MAX_PROMPT)
    rollouts = rollouts_of(servers, sync, max_concurrent=16)
    asyncio.run(rollouts.push_weights(weights(1), 1))
    groups = collect_over_a_restart(rollouts, problems, servers)
    assert_complete(groups, problems, 4)
    assert_generated_by(1, groups, version=1)
    assert (COUNTS | {"rollouts/server_failures": 1.0}).items() <= sampler_counts(rollouts).items()
    output = capsys.readouterr().err
    assert f"Server {servers[1].url} failed" in output and f"Server {servers[1].url} has recovered" in output


def test_workers_of_a_router(servers, tmp_path):
    """A listed worker that does not respond causes no delay, and is updated before it generates.

    `test_a_server_that_restarts_during_a_batch_is_updated_before_it_generates` tests failures during a batch, which are
    the same for workers, because prompts are sent to them directly.
    """
    problems, late = tiny_problems(24, MAX_PROMPT), servers[1]
    with running([Router(servers, tmp_path / "router.log")]) as (router,):
        rollouts = rollouts_of([router], DiskSync(tmp_path / "weights", "a run", TINY, "float32"), max_concurrent=16)
        for version in (1, 2):
            asyncio.run(rollouts.push_weights(weights(version), version))
            asked = [len(server.requests()) for server in servers]
            groups = collect(rollouts, problems, 4, Sampling(16))
            assert_complete(groups, problems, 4)
            assert_generated_by(version, groups, version)
            shares = [len(server.requests()) - count for server, count in zip(servers, asked, strict=True)]
            assert sum(shares) == 24 and min(shares) >= 6

        before = late.requests()
        late.kill()
        assert router.workers() == {server.url for server in servers}
        start = time.monotonic()
        asyncio.run(rollouts.push_weights(weights(3), 3))
        assert_generated_by(3, collect(rollouts, problems, 4, Sampling(16)), version=3)
        assert time.monotonic() - start < STARTED_WITHIN / 2 and late.requests() == before

        late.start()
        groups = collect(rollouts, tiny_problems(96, MAX_PROMPT), 4, Sampling(100))
        assert_generated_by(3, groups, version=3)
        since = late.requests()[len(before) :]
        assert since[:2] == ["pause_generation", "update_weights_from_disk"] and since.count("generate") > 3
        assert COUNTS.items() <= sampler_counts(rollouts).items()


def test_a_rejected_request_raises_an_error(servers, tmp_path):
    rollouts = rollouts_of(servers, DiskSync(tmp_path, "a run", TINY, "float32"))
    asyncio.run(rollouts.push_weights(weights(1), 1))
    with pytest.raises(ServerError, match=r"rejected the prompt of problem '\d' with 400: .*context"):
        collect(rollouts, tiny_problems(2, MAX_PROMPT), 2, Sampling(2000))


def test_a_rejected_update_raises_an_error(servers, tmp_path, monkeypatch):
    sync = DiskSync(tmp_path, "a run", TINY, "float32")
    rollouts = rollouts_of(servers, sync)
    monkeypatch.setattr(hf, "save_pretrained", lambda path, *arguments, **keywords: path.mkdir(parents=True))
    with pytest.raises(ServerError, match="update_weights_from_disk failed"):
        asyncio.run(rollouts.push_weights(weights(1), 1))


def test_only_the_current_version_remains_on_disk(servers, tmp_path):
    rollouts = rollouts_of(servers[:1], DiskSync(tmp_path / "below", "a run", TINY, "float32"))
    for version in (1, 2, 3):
        asyncio.run(rollouts.push_weights(weights(version), version))
        (folder,) = (tmp_path / "below").iterdir()
        assert [one.name.split("-")[1] for one in folder.iterdir()] == [str(version)]
    rollouts.sampler.close()
    assert not folder.exists()


def test_a_server_without_memory_saver(servers):
    """The memory saver is not available on CPU, so a server that is put to sleep is rejected.

    If it is sent the requests anyway, it responds without freeing memory.
    """

    async def request(url: str) -> list[str]:
        async with open_client(60.0) as client:
            with pytest.raises(ServerError, match="--enable-memory-saver"):
                await SGLANG.sleep(client, url)
            with pytest.MonkeyPatch.context() as without_check:
                without_check.setattr(dialect, "_check_memory_saver", lambda client, url: asyncio.sleep(0))
                await SGLANG.sleep(client, url)
                await SGLANG.sleep(client, url)  # The server is already asleep.
            before = (await SGLANG.model_info(url)).weight_version
            await SGLANG.pause(client, url)
            await SGLANG.pause(client, url)  # The server is already awake.
            await SGLANG.resume(client, url)
            return [before, (await SGLANG.model_info(url)).weight_version]

    assert asyncio.run(request(servers[0].url)) == [dialect.ASLEEP, dialect.EMPTY]
