"""Which server is asked next, and the content of each request; real servers are in test_sglang.py."""

import asyncio
import json

import httpx
import pytest
from fake_servers import answer_to_get, generated, open_rollouts
from fakes import PATIENCE, collect, tiny_problems, until

from poly_epo_jax.rollouts.servers.fleet import Fleet
from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.types import Sampling

URLS = ["http://a", "http://b"]


async def never(url: str) -> None:
    await asyncio.Event().wait()


def test_the_server_with_the_fewest_outstanding_tokens_is_next():
    async def main() -> list[str]:
        fleet = Fleet(URLS, URLS, 100, never)
        async with fleet.lease(4, 900) as first, fleet.lease(4, 200) as second, fleet.lease(4, 200) as third:
            async with fleet.lease(4, 1) as fourth:
                pass
            async with fleet.lease(4, 1000) as fifth, fleet.lease(4, 1) as sixth:
                return [server.url for server in (first, second, third, fourth, fifth, sixth)]

    assert asyncio.run(main()) == ["http://a", "http://b", "http://b", "http://b", "http://b", "http://a"]


def test_no_server_is_given_more_than_it_takes_but_for_one_group():
    async def main() -> None:
        fleet, asks, happened = Fleet(URLS[:1], URLS, 10, never), asyncio.Event(), []

        async def second() -> None:
            asks.set()
            async with fleet.lease(1, 1):
                happened.append("the second is given")

        async with fleet.lease(64, 1):  # larger than the limit, but alone
            task = asyncio.create_task(second())
            await asks.wait()
            happened.append("the first is done")
        await task
        assert happened == ["the first is done", "the second is given"]

    asyncio.run(main())


def test_a_server_that_failed_is_asked_again_once_it_is_back():
    async def main() -> None:
        back = asyncio.Event()

        async def revive(url: str) -> None:
            assert url == "http://a"
            await back.wait()

        fleet = Fleet(URLS, URLS, 100, revive)
        async with fleet.lease(4, 1) as dead:
            fleet.fail(dead, "it died")
            fleet.fail(dead, "it is still dead")
        async with fleet.lease(4, 1) as other, fleet.lease(4, 1) as again:
            assert other.url == again.url == "http://b"
            back.set()
            await until(lambda: dead.is_up)
            async with fleet.lease(4, 1) as server:
                assert server.url == "http://a"
        await fleet.close()

    asyncio.run(main())


def test_a_server_that_is_given_up_is_told_though_others_go_on(capsys):
    async def main() -> None:
        async def give_up(url: str) -> None:
            raise ServerError(f"{url} has melted.")

        fleet = Fleet(URLS, URLS, 100, give_up)
        async with fleet.lease(4, 1) as server:
            fleet.fail(server, "it died")
            await until(lambda: server.failure is not None)
        async with fleet.lease(4, 1) as other:
            assert other.url == "http://b"

    asyncio.run(main())
    assert "The server http://a is given up for this batch: http://a has melted." in capsys.readouterr().err


def test_when_every_server_is_given_up_the_reason_is_told():
    async def main() -> None:
        async def give_up(url: str) -> None:
            raise ServerError(f"{url} has melted.")

        fleet = Fleet(URLS[:1], URLS, 100, give_up)
        async with fleet.lease(4, 1) as server:
            fleet.fail(server, "it died")
        async with fleet.lease(4, 1):
            pass

    with pytest.raises(ServerError, match=r"No server is left to generate. http://a has melted."):
        asyncio.run(main())


def test_a_revival_that_breaks_is_told_and_not_waited_for():
    async def main() -> None:
        async def breaks(url: str) -> None:
            raise KeyError("weight_version")

        fleet = Fleet(URLS[:1], URLS, 100, breaks)
        async with fleet.lease(4, 1) as server:
            fleet.fail(server, "it died")
        async with asyncio.timeout(PATIENCE), fleet.lease(4, 1):
            pass

    with pytest.raises(ServerError, match="weight_version"):
        asyncio.run(main())


def test_requests_say_all_that_sampling_does(monkeypatch):
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return answer_to_get(request.url.path, weight_version="w")
        asked.append(json.loads(request.content))
        return generated(request, "w")

    rollouts, problems = open_rollouts(answer, monkeypatch, URLS, None), tiny_problems(5, 8)
    sampling = Sampling(7, temperature=0.5, top_p=0.9, top_k=3, seed=11)
    groups = collect(rollouts, problems, 4, sampling)
    assert sorted(group.problem.id for group in groups) == ["0", "1", "2", "3", "4"]
    assert len(asked) == 5  # one for each prompt
    assert all(body["return_logprob"] and len(body["input_ids"]) == 4 for body in asked)
    assert all(ids == body["input_ids"][0] for body in asked for ids in body["input_ids"])
    said = [parameters for body in asked for parameters in body["sampling_params"]]
    seeds = [parameters.pop("sampling_seed") for parameters in said]
    assert len(set(seeds)) == 20 and all(0 <= seed < 2**31 for seed in seeds)
    parameters = {"max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_token_ids": [1, 14]}
    assert said == [parameters] * 20
    collect(rollouts, problems, 4, sampling)
    again = [parameters["sampling_seed"] for body in asked[5:] for parameters in body["sampling_params"]]
    assert sorted(again) == sorted(seeds)


def test_only_what_is_missing_of_a_group_is_resampled(monkeypatch):
    """With the seeds that it was first asked for with: each generation is kept apart, though asked for in one list."""
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return answer_to_get(request.url.path, weight_version="w")
        parameters = json.loads(request.content)["sampling_params"]
        asked.append([one["sampling_seed"] for one in parameters] if isinstance(parameters, list) else parameters)
        answers = generated(request, "w").json()
        if len(asked) == 1:
            answers[1]["meta_info"]["finish_reason"]["type"] = "abort"
        return httpx.Response(200, json=answers)

    rollouts = open_rollouts(answer, monkeypatch, URLS, None)
    (group,) = collect(rollouts, tiny_problems(1, 8), 4, Sampling(7))
    assert len(group.generations) == 4
    first, second = asked
    assert second["sampling_seed"] == first[1]
    assert rollouts.metrics()["rollouts/resampled"] == 1


def test_a_server_that_always_aborts_is_not_asked_for_ever(monkeypatch):
    def abort(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return answer_to_get(request.url.path, weight_version="w")
        return generated(request, "w", "abort", tokens=0)

    rollouts = open_rollouts(abort, monkeypatch, URLS, None)
    with pytest.raises(ServerError, match="failed 8 times to generate for problem 0; see their logs"):
        collect(rollouts, tiny_problems(1, 8), 2, Sampling(4))
    assert rollouts.metrics()["rollouts/resampled"] == 16


def test_weights_that_change_during_an_evaluation_end_it(monkeypatch):
    version = "w"

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal version
        if request.method == "GET":
            return answer_to_get(request.url.path, weight_version=version)
        version = "another"
        return generated(request, version)

    with pytest.raises(ServerError, match=r"http://[ab] changed weights during the batch; rerun the evaluation"):
        collect(open_rollouts(answer, monkeypatch, URLS, None), tiny_problems(1, 8), 2, Sampling(4))
