"""Tests vLLM rollouts with two real servers, which all tests share: generations, weight updates and failures."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
from fake_servers import UNCHECKED
from fakes import ByLetter, assert_exact_versions, collect, sampler_counts, tiny_params, tiny_problems, trainer_logprobs
from sglang_servers import ROOT, STARTED_WITHIN, SGLangServer
from training_runs import SETTINGS, as_flags, rows_of
from vllm_servers import ALPHABET, CONTEXT, TOKENIZER, UNTIED, UNTIED_MODEL, VLLMServer, vllm_servers

from poly_epo_jax import main
from poly_epo_jax.config.default import get_config
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.servers.client import ServerSampler
from poly_epo_jax.rollouts.vllm import VLLM
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.types import Group, Problem, Sampling

pytestmark = pytest.mark.slow

STOP_IDS = (1, 14)
MAX_PROMPT = 300  # Longer than two blocks of the prefix cache.
COUNTS = dict.fromkeys(["rollouts/server_failures", "rollouts/resampled", "rollouts/invalid_responses"], 0.0)
COUNTS |= {"rollouts/rejected_updates": 0.0}


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VLLMServer]]:
    with vllm_servers(tmp_path_factory.mktemp("vllm")) as started:
        yield started


def rollouts_of(
    servers: Sequence[SGLangServer],
    folder: Path,
    temperature: float = 1.0,
    stop_ids: Sequence[int] = STOP_IDS,
    in_flight: bool = False,
) -> Rollouts:
    config = get_config()
    config.rollouts.in_flight = in_flight
    config.rollouts.update({"name": "vllm", "urls": ",".join(server.url for server in servers), "max_concurrent": 16})
    config.rollouts.update({"weights_dir": str(folder), "weights_dtype": "float32", "wait_seconds": STARTED_WITHIN})
    config.train.max_prompt_tokens = MAX_PROMPT
    config.sampling.temperature = temperature
    sampler = SAMPLERS["vllm"].open(UNTIED_MODEL, make_mesh(1, 1, 1), stop_ids, read_config(config))
    return Rollouts(sampler, TOKENIZER, ByLetter(), MAX_PROMPT)


def counts_of(rollouts: Rollouts) -> dict[str, float]:
    """Returns the counters of failures and of generations that were not accepted."""
    metrics = sampler_counts(rollouts)
    return {name: metrics[name] for name in COUNTS}


def push(rollouts: Rollouts, version: int) -> None:
    """Pushes the weights `tiny_params(version)` as this version."""
    asyncio.run(rollouts.push_weights(tiny_params(version, UNTIED_MODEL), version))


def problems(count: int, max_length: int = 8) -> list[Problem]:
    return tiny_problems(count, max_length, alphabet=ALPHABET)


def mismatch(groups: Sequence[Group], version: int, temperature: float = 1.0) -> float:
    """Returns the maximum difference between the log-probabilities of the sampler and of the trainer."""
    trainer, sampler = trainer_logprobs(version, groups, temperature, UNTIED_MODEL)
    assert len(trainer) > 50 and trainer.std() > 0.5
    return float(np.abs(trainer - sampler).max())


def tokens_of(groups: Sequence[Group]) -> list[list[int]]:
    return [y.token_ids.tolist() for group in groups for y in group.generations]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_generations_match_the_trainer_and_depend_on_seeds(servers, tmp_path, temperature):
    rollouts, prompts = rollouts_of(servers, tmp_path, temperature), problems(12)
    push(rollouts, 3)
    groups = collect(rollouts, prompts, 4, Sampling(24, temperature))
    assert mismatch(groups, 3, temperature) < 1e-4
    generations = [y for group in groups for y in group.generations]
    assert {version for y in generations for version in y.weight_versions} == {3}
    assert {y.finish_reason for y in generations} == {"stop", "length"}
    for y in generations:
        stopped = y.finish_reason == "stop"
        assert stopped == (y.token_ids[-1] in STOP_IDS) and not np.isin(y.token_ids[:-1], STOP_IDS).any()
        assert stopped or len(y.token_ids) == 24
    # Each seed has its own response, which does not depend on the server, the batch, or the other seeds of a prompt.
    alone = rollouts_of(servers[:1], tmp_path / "alone", temperature)
    push(alone, 3)
    assert tokens_of(collect(alone, prompts, 4, Sampling(24, temperature))) == tokens_of(groups)
    assert len(set(map(tuple, tokens_of(groups)))) > 40
    assert counts_of(rollouts) == counts_of(alone) == COUNTS


def test_a_prefix_cache_of_older_weights_is_emptied(servers, tmp_path, monkeypatch):
    rollouts, prompts = rollouts_of(servers, tmp_path), problems(1, 1) + problems(MAX_PROMPT, MAX_PROMPT)[-3:]
    for version in (1, 2):
        push(rollouts, version)
        for server in servers:
            sampler = object.__new__(ServerSampler)
            sampler.__dict__ = rollouts.sampler.__dict__ | {"urls": [server.url]}
            groups = collect(Rollouts(sampler, TOKENIZER, ByLetter(), MAX_PROMPT), prompts, 8, Sampling(16))
            assert mismatch(groups, version) < 1e-4

    async def do_not_pause(self, client, url, keep):  # Every kind of pause of an idle server empties the cache.
        pass

    async def only_load(self, client, url, folder, version):
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        (await client.post(f"{url}/collective_rpc", json=body)).raise_for_status()
        (await client.post(f"{url}/update_weight_version", json={"new_version": version})).raise_for_status()

    monkeypatch.setattr(VLLM, "pause", do_not_pause)
    monkeypatch.setattr(VLLM, "load_folder", only_load)
    with pytest.raises(ServerError, match="prefix cache contains keys and values of other weights"):
        push(rollouts, 3)
    assert isinstance(rollouts.sampler, ServerSampler)
    monkeypatch.setattr(rollouts.sampler._weights, "check", UNCHECKED)
    push(rollouts, 4)
    assert mismatch(collect(rollouts, prompts, 8, Sampling(16)), 4) > 0.01  # The stale cache changes the results.


def test_running_generations_continue_with_new_weights(servers, tmp_path):
    """Servers compute keys and values of the previous tokens again, with the new weights."""
    rollouts = rollouts_of(servers, tmp_path, stop_ids=(), in_flight=True)
    prompts = problems(MAX_PROMPT, MAX_PROMPT)[-4:]
    count = 8  # twice as many generations as run at once

    async def update_continuously() -> tuple[list[Group], int]:
        version, groups = 1, list[Group]()
        await rollouts.push_weights(tiny_params(1, UNTIED_MODEL), 1)
        for _ in range(5):  # All updates may fall between generations, because those that run at once end together.
            generating = asyncio.create_task(generate(rollouts, prompts, count, Sampling(200)))
            while not generating.done():
                version += 1
                await rollouts.push_weights(tiny_params(version, UNTIED_MODEL), version)
            groups += await generating
            if num_versions(groups) > 1:
                break
        return groups, version

    groups, version = asyncio.run(update_continuously())
    assert {len(y.token_ids) for group in groups for y in group.generations} == {200}
    assert len(assert_exact_versions(groups, UNTIED_MODEL)) > 1
    assert num_versions(groups) > 1
    assert counts_of(rollouts) == COUNTS
    # The prefix cache of running generations is not read after an update.
    assert assert_exact_versions(collect(rollouts, prompts, 4, Sampling(16)), UNTIED_MODEL) == {version}


def num_versions(groups: Sequence[Group]) -> int:
    """Returns the maximum number of weight versions in one generation."""
    return max(len(set(y.weight_versions)) for group in groups for y in group.generations)


async def generate(rollouts: Rollouts, prompts: Sequence[Problem], count: int, sampling: Sampling) -> list[Group]:
    return [group async for group in rollouts.generate(prompts, count, sampling)]


def test_training(servers, tmp_path, caches):
    """Three steps from random weights. The log-probabilities of the servers and the trainer agree for every token.

    test_sglang_training.py has the same test with SGLang.
    """
    settings = SETTINGS | {
        "workdir": tmp_path / "run",
        "model.path": servers[0].model,
        "mesh.num_devices": 1,
        "rollouts.name": "vllm",
        "rollouts.urls": ",".join(server.url for server in servers),
        "rollouts.weights_dtype": "float32",
        "rollouts.weights_dir": tmp_path / "w",
        "optimizer.learning_rate": 1e-3,
        "train.num_steps": 3,
        "eval.every": 0,
    }
    assert main.main([f"--config={ROOT / 'configs/polynomial.py'}:grpo", *as_flags(settings | caches)]) == 0
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert 0 < max(row["mismatch/max"] for row in rows) < 1e-3 and {row["response/staleness"] for row in rows} == {0.0}
    assert sum(row["rollouts/resampled"] + row["rollouts/server_failures"] for row in rows) == 0
    assert not any((tmp_path / "w").glob("*"))


def test_settings_are_verified(servers):
    def error(dialect: VLLM) -> str:
        with pytest.raises(ServerError) as raised:
            asyncio.run(dialect.probe(servers[0].url))
        return str(raised.value)

    assert "a vocabulary of 22 tokens, but that of the policy has 23" in error(VLLM(23))
    assert f"--max-model-len {CONTEXT + 1}" in error(VLLM(UNTIED.vocab_size, CONTEXT + 1))
    endpoint = asyncio.run(VLLM(UNTIED.vocab_size, CONTEXT, temperature=0.5).probe(servers[0].url))
    assert not endpoint.is_router and not endpoint.update_error
    info = asyncio.run(VLLM().model_info(servers[0].url))
    assert info.path == info.tokenizer_path == str(servers[0].model) and info.has_weights


def test_generations_beyond_the_context_raise_an_error(servers, tmp_path):
    rollouts = rollouts_of(servers[:1], tmp_path, stop_ids=())
    push(rollouts, 1)
    with pytest.raises(
        ServerError, match=r"of 600 tokens, at the end of its context; start it with a larger --max-mod"
    ):
        collect(rollouts, problems(1), 4, Sampling(600))


def test_a_server_that_is_killed_during_a_batch_is_updated_before_it_generates(servers, tmp_path, capsys):
    """The other server is paused while the killed one restarts."""
    (held, dying), prompts = servers, problems(24)
    rollouts = rollouts_of(servers, tmp_path)
    push(rollouts, 1)
    asked: list[str] = []

    def restart() -> None:
        dying.start()
        deadline = time.monotonic() + STARTED_WITHIN
        while len(dying.requests()) < len(asked) + 8:  # Pause, load, name, empty the cache, resume, and verify.
            assert time.monotonic() < deadline
            time.sleep(0.2)
        httpx.post(f"{held.url}/resume").raise_for_status()

    async def collect_over_a_restart() -> list[Group]:
        groups, action = [], None
        async for group in rollouts.generate(prompts, 4, Sampling(150)):
            groups.append(group)
            if len(groups) == 2:
                httpx.post(f"{held.url}/pause?mode=keep").raise_for_status()
                dying.kill()  # Blocks the event loop, so that most of the prompts are still pending.
                asked.extend(dying.requests())
                action = asyncio.create_task(asyncio.to_thread(restart))
        assert action is not None
        await action
        return groups

    groups = asyncio.run(collect_over_a_restart())
    assert {group.problem.id for group in groups} == {problem.id for problem in prompts}
    assert {len(group.generations) for group in groups} == {4} and mismatch(groups, 1) < 1e-4
    assert counts_of(rollouts) == COUNTS | {"rollouts/server_failures": 1.0}
    output = capsys.readouterr().err
    assert f"Server {dying.url} failed" in output and f"Server {dying.url} has recovered" in output
    # The restarted server received the current weights before its first prompt.
    since = dying.requests()[len(asked) :]
    update = ["pause", "collective_rpc", "update_weight_version", "reset_prefix_cache", "resume"]
    assert since[:5] == update and since.count("inference/v1/generate") > 5
