"""Tests the selection of servers and the content of requests. test_sglang.py uses real servers."""

import asyncio
import json

import httpx
import pytest
from fake_servers import answer_to_get, generated, open_rollouts
from fakes import PATIENCE, TINY_ALPHABET, ByLetter, collect, sampler_counts, tiny_problems, until

from poly_epo_jax.config.keys import Config
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.servers.fleet import ServerPool
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.system.http_client import RequestError, ServerError
from poly_epo_jax.types import Group, Problem, Sampling

URLS = ["http://a", "http://b"]


async def never(url: str) -> None:
    await asyncio.Event().wait()


def test_the_server_with_the_fewest_outstanding_tokens_is_selected():
    async def main() -> list[str]:
        pool = ServerPool(URLS, URLS, 100, never)
        async with pool.lease(4, 900) as first, pool.lease(4, 200) as second, pool.lease(4, 200) as third:
            async with pool.lease(4, 1) as fourth:
                pass
            async with pool.lease(4, 1000) as fifth, pool.lease(4, 1) as sixth:
                return [server.url for server in (first, second, third, fourth, fifth, sixth)]

    assert asyncio.run(main()) == ["http://a", "http://b", "http://b", "http://b", "http://b", "http://a"]


def test_the_generation_limit_of_a_server_is_only_exceeded_by_a_single_request():
    async def main() -> None:
        pool, asks, happened = ServerPool(URLS[:1], URLS, 10, never), asyncio.Event(), []

        async def second() -> None:
            asks.set()
            async with pool.lease(1, 1):
                happened.append("the second is given")

        async with pool.lease(64, 1):  # Exceeds the limit, but the server is idle.
            task = asyncio.create_task(second())
            await asks.wait()
            happened.append("the first is done")
        await task
        assert happened == ["the first is done", "the second is given"]

    asyncio.run(main())


def test_each_server_has_the_documented_generation_limit():
    async def main() -> list[str]:
        pool = ServerPool(URLS, URLS, 10, never)  # the servers of `rollouts.urls`, and the workers of its routers
        async with pool.lease(10, 1) as first, pool.lease(10, 1) as second:
            return [first.url, second.url]

    assert asyncio.run(asyncio.wait_for(main(), PATIENCE)) == URLS
    (text,) = (field.metadata["meaning"] for key, field, _ in Config().flat() if key == "rollouts.max_concurrent")
    assert "per server or router worker" in text


def test_concurrent_calls_share_the_generation_limit(monkeypatch: pytest.MonkeyPatch):
    running, most = 0, 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        await asyncio.sleep(0)
        if request.method == "GET":
            return answer_to_get(request.url.path, weight_version="w")
        count = len(json.loads(request.content)["sampling_params"])
        running += count
        most = max(most, running)
        await until(lambda: most >= 8)
        for _ in range(100):  # Further requests would arrive now.
            await asyncio.sleep(0)
        running -= count
        return generated(request, "w")

    rollouts = open_rollouts(handle, monkeypatch, URLS[:1], None)
    rollouts.sampler.max_concurrent = 8  # pyright: ignore[reportAttributeAccessIssue]

    async def call(problem: Problem) -> list[Group]:
        return [group async for group in rollouts.generate([problem], 4, Sampling(4))]

    async def main() -> list[list[Group]]:
        return await asyncio.gather(*map(call, tiny_problems(5, 8)))

    assert len(asyncio.run(main())) == 5
    assert most == 8


def test_a_failed_server_is_used_again_after_it_has_recovered():
    async def main() -> None:
        back = asyncio.Event()

        async def recover(url: str) -> None:
            assert url == "http://a"
            await back.wait()

        pool = ServerPool(URLS, URLS, 100, recover)
        async with pool.lease(4, 1) as dead:
            pool.fail(dead, "it died")
            pool.fail(dead, "it is still dead")
        async with pool.lease(4, 1) as other, pool.lease(4, 1) as again:
            assert other.url == again.url == "http://b"
            back.set()
            await until(lambda: dead.is_up)
            async with pool.lease(4, 1) as server:
                assert server.url == "http://a"
        await pool.close()

    asyncio.run(main())


def test_a_failed_recovery_is_reported_while_other_servers_continue(capsys):
    async def main() -> None:
        async def fail_to_recover(url: str) -> None:
            raise ServerError(f"{url} has melted.")

        pool = ServerPool(URLS, URLS, 100, fail_to_recover)
        async with pool.lease(4, 1) as server:
            pool.fail(server, "it died")
            await until(lambda: server.failure is not None)
        async with pool.lease(4, 1) as other:
            assert other.url == "http://b"

    asyncio.run(main())
    assert "Server http://a is not used for the rest of this batch: http://a has melted." in capsys.readouterr().err


def test_an_error_is_raised_if_all_recoveries_fail():
    async def main() -> None:
        async def fail_to_recover(url: str) -> None:
            raise ServerError(f"{url} has melted.")

        pool = ServerPool(URLS[:1], URLS, 100, fail_to_recover)
        async with pool.lease(4, 1) as server:
            pool.fail(server, "it died")
        async with pool.lease(4, 1):
            pass

    with pytest.raises(ServerError, match=r"All servers have failed. http://a has melted."):
        asyncio.run(main())


def test_an_unexpected_error_of_a_recovery_is_raised():
    async def main() -> None:
        async def raise_key_error(url: str) -> None:
            raise KeyError("weight_version")

        pool = ServerPool(URLS[:1], URLS, 100, raise_key_error)
        async with pool.lease(4, 1) as server:
            pool.fail(server, "it died")
        async with asyncio.timeout(PATIENCE), pool.lease(4, 1):
            pass

    with pytest.raises(ServerError, match="weight_version"):
        asyncio.run(main())


def test_requests_contain_all_sampling_parameters(monkeypatch):
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return answer_to_get(request.url.path, weight_version="w")
        bodies.append(json.loads(request.content))
        return generated(request, "w")

    rollouts, problems = open_rollouts(answer, monkeypatch, URLS, None), tiny_problems(5, 8)
    sampling = Sampling(7, temperature=0.5, top_p=0.9, top_k=3, seed=11)
    groups = collect(rollouts, problems, 4, sampling)
    assert sorted(group.problem.id for group in groups) == ["0", "1", "2", "3", "4"]
    assert len(bodies) == 5  # One request per prompt.
    assert all(body["return_logprob"] and len(body["input_ids"]) == 4 for body in bodies)
    assert all(ids == body["input_ids"][0] for body in bodies for ids in body["input_ids"])
    sent = [parameters for body in bodies for parameters in body["sampling_params"]]
    seeds = [parameters.pop("sampling_seed") for parameters in sent]
    assert len(set(seeds)) == 20 and all(0 <= seed < 2**31 for seed in seeds)
    parameters = {"max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_token_ids": [1, 14]}
    assert sent == [parameters] * 20
    collect(rollouts, problems, 4, sampling)
    again = [parameters["sampling_seed"] for body in bodies[5:] for parameters in body["sampling_params"]]
    assert sorted(again) == sorted(seeds)


def test_only_missing_generations_of_a_group_are_resampled(monkeypatch):
    """The aborted generation of a list is resampled alone, with the same seed."""
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return answer_to_get(request.url.path, weight_version="w")
        parameters = json.loads(request.content)["sampling_params"]
        bodies.append([one["sampling_seed"] for one in parameters] if isinstance(parameters, list) else parameters)
        answers = generated(request, "w").json()
        if len(bodies) == 1:
            answers[1]["meta_info"]["finish_reason"]["type"] = "abort"
        return httpx.Response(200, json=answers)

    rollouts = open_rollouts(answer, monkeypatch, URLS, None)
    (group,) = collect(rollouts, tiny_problems(1, 8), 4, Sampling(7))
    assert len(group.generations) == 4
    first, second = bodies
    assert second["sampling_seed"] == first[1]
    assert sampler_counts(rollouts)["rollouts/resampled"] == 1


def test_a_server_that_always_aborts_raises_an_error_after_8_attempts(monkeypatch):
    def abort(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return answer_to_get(request.url.path, weight_version="w")
        return generated(request, "w", "abort", tokens=0)

    rollouts = open_rollouts(abort, monkeypatch, URLS, None)
    with pytest.raises(ServerError, match="for problem '0' on http://a, http://b after 8 attempts"):
        collect(rollouts, tiny_problems(1, 8), 2, Sampling(4))
    assert sampler_counts(rollouts)["rollouts/resampled"] == 16


def test_a_healthy_server_that_rejects_all_prompts_does_not_get_every_retry(monkeypatch):
    received = {"a": 0, "b": 0}

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return answer_to_get(request.url.path, weight_version="w")
        received[request.url.host] += 1
        if request.url.host == "b":
            return httpx.Response(503)
        await until(lambda: received["b"] > 0)
        for _ in range(20_000):  # b recovers in the meantime, and could get the retries
            await asyncio.sleep(0)
        return generated(request, "w")

    rollouts = open_rollouts(answer, monkeypatch, URLS, None)
    rollouts.sampler.max_concurrent = 2  # pyright: ignore[reportAttributeAccessIssue]
    assert len(collect(rollouts, tiny_problems(2, 8), 2, Sampling(4))) == 2
    assert received == {"a": 2, "b": 1}


def test_an_evaluation_omits_a_prompt_that_the_server_rejects(monkeypatch):
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return answer_to_get(request.url.path, weight_version="w")
        is_long = any(len(ids) > 2 for ids in json.loads(request.content)["input_ids"])
        return httpx.Response(400, json={"error": "too long"}) if is_long else generated(request, "w")

    rollouts, problems = open_rollouts(answer, monkeypatch, URLS, None), tiny_problems(6, 3)
    with pytest.raises(RequestError, match=r"rejected the prompt of problem '[25]' with 400"):
        collect(rollouts, problems, 2, Sampling(4))
    rollouts = Rollouts(
        rollouts.sampler, build_character_tokenizer(TINY_ALPHABET), ByLetter(), 8, omits_failed_requests=True
    )
    groups = collect(rollouts, problems, 2, Sampling(4))
    reasons = {group.problem.id: group.failures[0].reason for group in groups if group.failures}
    assert list(reasons) == ["2", "5"] and all("400" in reason for reason in reasons.values())
    assert [len(group.generations) for group in groups] == [2, 2, 0, 2, 2, 0]


def test_a_weight_change_during_an_evaluation_raises_an_error(monkeypatch):
    version = "w"

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal version
        if request.method == "GET":
            return answer_to_get(request.url.path, weight_version=version)
        version = "another"
        return generated(request, version)

    with pytest.raises(ServerError, match=r"http://[ab] changed during the batch; rerun the evaluation"):
        collect(open_rollouts(answer, monkeypatch, URLS, None), tiny_problems(1, 8), 2, Sampling(4))


def test_a_server_that_restarts_with_another_model_is_not_evaluated(monkeypatch):
    """SGLang names the weights of every model "default" until they are updated."""
    model = "m"

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal model
        if request.method == "GET":
            return answer_to_get(request.url.path, model_path=model, weight_version="default")
        if model == "m":
            model = "another"
            raise httpx.RemoteProtocolError("Server disconnected")
        return generated(request, "default")

    rollouts = open_rollouts(answer, monkeypatch, URLS[:1], None, required_weights="m default")
    with pytest.raises(ServerError, match="http://a changed during the batch; rerun the evaluation"):
        collect(rollouts, tiny_problems(1, 8), 2, Sampling(4))
    with pytest.raises(ServerError, match=r"weights of http://a changed .* rerun it"):
        collect(rollouts, tiny_problems(1, 8), 2, Sampling(4))


def test_weights_that_change_before_an_evaluation_raise_an_error(monkeypatch):
    """The weights are named in about.json when the server is opened."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return answer_to_get(request.url.path, weight_version="w")
        return generated(request, "w")

    for version in (None, "w"):
        rollouts = open_rollouts(answer, monkeypatch, URLS, None, required_weights=version)
        assert len(collect(rollouts, tiny_problems(1, 8), 2, Sampling(4))) == 1
    with pytest.raises(ServerError, match=r"weights of http://a changed .* rerun it"):
        rollouts = open_rollouts(answer, monkeypatch, URLS, None, required_weights="v")
        collect(rollouts, tiny_problems(1, 8), 2, Sampling(4))
