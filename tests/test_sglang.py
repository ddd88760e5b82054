"""SGLang rollouts against real servers: what they generate, their weights, their deaths."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest
from fakes import TINY, TINY_ALPHABET, collect, tiny_params, tiny_problems, trainer_logprobs
from sglang_servers import Router, SGLangServer, require_sglang, running

from poly_epo_jax.model import hf
from poly_epo_jax.rollouts import weight_sync
from poly_epo_jax.rollouts.sglang import SGLangRollouts
from poly_epo_jax.rollouts.weight_sync import DiskSync, TensorSync, WeightSync
from poly_epo_jax.servers import ServerError
from poly_epo_jax.tokenizer import build_character_tokenizer
from poly_epo_jax.types import Counting, Group, Params, Problem, Rollouts, Sampling

pytestmark = pytest.mark.slow

TOKENIZER = build_character_tokenizer(TINY_ALPHABET)
STOP_IDS = (1, 14)
MAX_PROMPT = 8
FLAGS = ("--max-total-tokens", "16384", "--max-running-requests", "32", "--context-length", "512")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the servers start with: weights of no version."""
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
    return TensorSync(TINY, "float32", tensor_parallel=1)


def rollouts_of(
    servers: Sequence[SGLangServer], sync: WeightSync, stop_ids: Sequence[int] = STOP_IDS, **changes: Any
) -> SGLangRollouts:
    settings = {"max_prompt_tokens": MAX_PROMPT, "max_rows": 64, "timeout_seconds": 60.0, "wait_seconds": 120.0}
    return SGLangRollouts([one.url for one in servers], sync, TOKENIZER, stop_ids, **(settings | changes))


def weights(seed: int) -> Params:
    return jax.device_put(tiny_params(seed))


def assert_generated_by(seed: int, groups: Sequence[Group], version: int, temperature: float = 1.0) -> None:
    trainer, sampler = trainer_logprobs(seed, groups, temperature)
    assert len(trainer) > 50 and trainer.std() > 0.5
    np.testing.assert_allclose(sampler, trainer, rtol=0, atol=1e-4)
    assert {y.weight_version for group in groups for y in group.generations} == {version}


def assert_complete(groups: Sequence[Group], problems: Sequence[Problem], num_generations: int) -> None:
    """Every problem once, every generation whole."""
    assert sorted(group.problem.id for group in groups) == sorted(problem.id for problem in problems)
    for group in groups:
        assert len(group.generations) == num_generations
        assert all(len(y.token_ids) == len(y.logprobs) for y in group.generations)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_generations_are_the_trainers(servers, sync, temperature):
    rollouts, problems = rollouts_of(servers, sync), tiny_problems(12, MAX_PROMPT)
    assert isinstance(rollouts, Rollouts) and isinstance(rollouts, Counting)
    asyncio.run(rollouts.update_weights(weights(1), 3))
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
    assert rollouts.metrics() == {"rollouts/lost_servers": 0.0, "rollouts/drawn_again": 0.0}


def test_every_update_reaches_every_server(servers, sync):
    rollouts, problems = rollouts_of(servers, sync), tiny_problems(12, MAX_PROMPT)
    for version in (1, 2, 3):
        asyncio.run(rollouts.update_weights(weights(version), version))
        for server in servers:
            groups = collect(rollouts_on(server, rollouts), problems[:6], 2, Sampling(16))
            assert_generated_by(version, groups, version)


def rollouts_on(server: SGLangServer, rollouts: SGLangRollouts) -> SGLangRollouts:
    """The same client, as it talks to one of its servers."""
    one = object.__new__(SGLangRollouts)
    one.__dict__ = rollouts.__dict__ | {"urls": [server.url]}
    return one


def test_a_cache_of_older_weights_is_found_out(servers, tmp_path, monkeypatch):
    """Without the flush, the tokens that follow a cached prompt would come from keys and values of the old weights."""
    rollouts, problems = rollouts_of(servers[:1], DiskSync(tmp_path, "a run", TINY, "float32")), tiny_problems(8, 8)[7:]
    sampling = Sampling(24)
    asyncio.run(rollouts.update_weights(weights(1), 1))
    collect(rollouts, problems, 8, sampling)

    send = weight_sync.post

    async def without_flush(client, url, endpoint, body):
        return await send(client, url, endpoint, body | {"flush_cache": False} if "flush_cache" in body else body)

    with monkeypatch.context() as forgetful:
        forgetful.setattr(weight_sync, "post", without_flush)
        with pytest.raises(ServerError, match="kept the cache of its old weights"):
            asyncio.run(rollouts.update_weights(weights(2), 2))
        trainer, sampler = trainer_logprobs(2, collect(rollouts, problems, 8, sampling), 1.0)
        assert np.abs(trainer - sampler).max() > 0.01  # so the check is worth having

    asyncio.run(rollouts.update_weights(weights(2), 3))
    assert_generated_by(2, collect(rollouts, problems, 8, sampling), version=3)


def test_weights_of_another_run_are_not_trained_on(servers, tmp_path):
    mine = rollouts_of(servers[:1], DiskSync(tmp_path, "mine", TINY, "float32"))
    theirs = rollouts_of(servers[:1], DiskSync(tmp_path, "theirs", TINY, "float32"))
    asyncio.run(mine.update_weights(weights(1), 1))
    asyncio.run(theirs.update_weights(weights(2), 1))
    problems = tiny_problems(4, MAX_PROMPT)
    groups = collect(mine, problems, 4, Sampling(16))
    assert_complete(groups, problems, 4)
    assert_generated_by(1, groups, version=1)
    counts = mine.metrics()
    assert counts["rollouts/drawn_again"] > 0 and counts["rollouts/lost_servers"] > 0


def test_partial_generations_are_drawn_again(servers, tmp_path):
    rollouts = rollouts_of(servers[:1], DiskSync(tmp_path, "a run", TINY, "float32"), stop_ids=())
    asyncio.run(rollouts.update_weights(weights(1), 1))
    problems = tiny_problems(8, MAX_PROMPT)
    abort = threading.Timer(1.0, httpx.post, [f"{servers[0].url}/abort_request"], {"json": {"abort_all": True}})
    abort.start()
    groups = collect(rollouts, problems, 4, Sampling(400))
    abort.join()
    assert_complete(groups, problems, 4)
    assert all(len(y.token_ids) == 400 or y.finish_reason == "stop" for g in groups for y in g.generations)
    assert rollouts.metrics()["rollouts/drawn_again"] > 0


def collect_with(rollouts: SGLangRollouts, problems: Sequence[Problem], after: int, act: Any) -> list[Group]:
    """All groups; `act` runs in a thread once `after` of them have come."""

    async def main() -> list[Group]:
        groups, action = [], None
        async for group in rollouts.generate(problems, 4, Sampling(300)):
            groups.append(group)
            if len(groups) == after:
                action = asyncio.create_task(asyncio.to_thread(act))
        assert action is not None
        await action
        return groups

    return asyncio.run(main())


def test_the_prompts_of_a_dead_server_go_to_another(servers, model, tmp_path, capsys):
    dying = SGLangServer(model, model.with_name("dying.log"), *FLAGS).start()
    try:
        rollouts = rollouts_of([servers[0], dying], DiskSync(tmp_path, "a run", TINY, "float32"), max_rows=16)
        asyncio.run(rollouts.update_weights(weights(1), 1))
        problems = tiny_problems(24, MAX_PROMPT)
        groups = collect_with(rollouts, problems, 2, dying.kill)
    finally:
        dying.kill()
    assert_complete(groups, problems, 4)
    assert_generated_by(1, groups, version=1)
    assert rollouts.metrics()["rollouts/lost_servers"] == 1
    assert f"Lost the server {dying.url}" in capsys.readouterr().err


def test_a_server_that_is_killed_and_started_again_completes_the_batch(model, tmp_path, capsys):
    """It comes back with the weights of its model folder, and is given the present ones before it serves."""
    require_sglang()
    server = SGLangServer(model, model.with_name("restarted.log"), *FLAGS).start()

    def restart() -> None:
        server.kill()
        server.start()

    try:
        rollouts = rollouts_of([server], DiskSync(tmp_path, "a run", TINY, "float32"), max_rows=16, wait_seconds=300.0)
        asyncio.run(rollouts.update_weights(weights(1), 1))
        problems = tiny_problems(16, MAX_PROMPT)
        groups = collect_with(rollouts, problems, 2, restart)
    finally:
        server.kill()
    assert_complete(groups, problems, 4)
    assert_generated_by(1, groups, version=1)
    assert rollouts.metrics()["rollouts/lost_servers"] == 1
    said = capsys.readouterr().err
    assert "Waiting up to 300 s for SGLang server" in said and f"The server {server.url} is back" in said


def test_workers_behind_a_router_are_current_before_they_serve(servers, model, tmp_path, capsys):
    """One is killed in the middle of a batch, and comes back with the weights of its model folder."""
    dying = SGLangServer(model, model.with_name("behind-a-router.log"), *FLAGS)
    workers, problems = [servers[0], dying], tiny_problems(32, MAX_PROMPT)

    def restart() -> None:
        dying.kill()
        dying.start()
        deadline = time.monotonic() + 120
        while dying.url not in router.workers():
            assert time.monotonic() < deadline
            time.sleep(0.2)

    with running([dying]), running([Router(workers, tmp_path / "router.log")]) as (router,):
        rollouts = rollouts_of([router], DiskSync(tmp_path / "weights", "a run", TINY, "float32"), max_rows=16)
        asyncio.run(rollouts.update_weights(weights(1), 1))
        assert router.workers() == {worker.url for worker in workers}
        before = [worker.generated() for worker in workers]
        groups = collect(rollouts, problems, 4, Sampling(16))
        assert_complete(groups, problems, 4)
        assert_generated_by(1, groups, version=1)
        shares = [worker.generated() - count for worker, count in zip(workers, before, strict=True)]
        assert sum(shares) == 128 and min(shares) >= 32

        groups = collect_with(rollouts, problems, 2, restart)
        assert_complete(groups, problems, 4)
        assert_generated_by(1, groups, version=1)
        counts = rollouts.metrics()
        assert counts["rollouts/drawn_again"] == 0 and counts["rollouts/lost_servers"] >= 1
        assert f"The worker {dying.url} is out of the router" in capsys.readouterr().err

        asyncio.run(rollouts.update_weights(weights(2), 2))
        for _ in range(2):
            groups = collect(rollouts, problems[:8], 4, Sampling(16))
            assert_generated_by(2, groups, version=2)


def test_a_request_that_the_server_refuses_ends_the_run(servers, tmp_path):
    rollouts = rollouts_of(servers, DiskSync(tmp_path, "a run", TINY, "float32"))
    asyncio.run(rollouts.update_weights(weights(1), 1))
    with pytest.raises(ServerError, match=r"refuses the prompt of problem \d: .*context"):
        collect(rollouts, tiny_problems(2, MAX_PROMPT), 2, Sampling(2000))


def test_an_update_that_a_server_refuses_ends_the_run(servers, tmp_path, monkeypatch):
    sync = DiskSync(tmp_path, "a run", TINY, "float32")
    rollouts = rollouts_of(servers, sync)
    monkeypatch.setattr(hf, "save_pretrained", lambda path, *arguments, **keywords: path.mkdir(parents=True))
    with pytest.raises(ServerError, match="update_weights_from_disk failed"):
        asyncio.run(rollouts.update_weights(weights(1), 1))


def test_two_versions_at_most_are_on_disk(servers, tmp_path):
    rollouts = rollouts_of(servers[:1], DiskSync(tmp_path / "below", "a run", TINY, "float32"))
    for version in (1, 2, 3):
        asyncio.run(rollouts.update_weights(weights(version), version))
        (folder,) = (tmp_path / "below").iterdir()
        assert [one.name.split("-")[1] for one in folder.iterdir()] == [str(version)]
    rollouts.close()
    assert not folder.exists()
