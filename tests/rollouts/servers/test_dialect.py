"""Tests that `SGLangSampler` works with another kind of server through its `Dialect`."""

import asyncio
from collections.abc import Sequence

import httpx
import numpy as np
from fakes import ByLetter, collect

from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.servers.client import SGLangSampler
from poly_epo_jax.rollouts.servers.dialect import Dialect, Endpoint, ModelInfo, ServerCompletion
from poly_epo_jax.rollouts.servers.served_weights import ServedWeights
from poly_epo_jax.rollouts.servers.weight_sync import WeightSync
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.system.http_client import InvalidResponseError
from poly_epo_jax.types import Params, Problem, Request, Sampling

URL = "other://server"
PROBLEMS = [Problem(name, name, "") for name in "abc"]


class Other:
    """A dialect without HTTP. Its first generation is aborted."""

    def __init__(self):
        self.version, self.happened, self.is_paused, self.num_answers = "initial", [], False, 0

    async def wait_for(self, url: str, seconds: float) -> None:
        assert url == URL

    async def probe(self, url: str) -> Endpoint:
        return Endpoint(url, is_router=False, takes_weights=True)

    async def workers(self, url: str, seconds: float) -> list[str]:
        return []

    async def model_info(self, url: str) -> ModelInfo:
        return ModelInfo("m", "t", self.version)

    async def generate(
        self,
        client: httpx.AsyncClient,
        url: str,
        request: Request,
        indices: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int],
    ) -> list[ServerCompletion | InvalidResponseError]:
        assert not self.is_paused
        return [self.answer(request, index) for index in indices]

    def answer(self, request: Request, index: int) -> ServerCompletion:
        self.num_answers += 1
        token = 2 + int(request.seeds[index]) % 3
        reason = None if self.num_answers == 1 else "stop"
        return ServerCompletion(np.array([token, 1], np.int32), np.full(2, -1, np.float32), reason, self.version)

    async def pause(self, client: httpx.AsyncClient, url: str) -> None:
        self.is_paused = True

    async def resume(self, client: httpx.AsyncClient, url: str) -> None:
        self.is_paused = False

    async def probe_weights(self, client: httpx.AsyncClient, url: str, num_tokens: int) -> tuple[str, int]:
        return self.version, 0


class Renaming:
    """A weight sync that only transfers the name of the weights."""

    def __init__(self, server: Other):
        self.server, self.prepared, self.present, self.pushed = server, "", "", []

    def prepare(self, params: Params, version: str) -> None:
        self.prepared = version

    def switch(self) -> None:
        self.present = self.prepared

    async def push(self, client: httpx.AsyncClient, urls: Sequence[str]) -> None:
        assert self.server.is_paused and list(urls) == [URL]
        self.server.version = self.present

    def close(self) -> None:
        pass


def test_generations_and_weight_updates_use_the_dialect():
    server = Other()
    sync = Renaming(server)
    assert isinstance(server, Dialect) and isinstance(sync, WeightSync)
    weights = ServedWeights(sync, 8, 10.0, 10.0, server)
    sampler = SGLangSampler([URL], weights, (1,), vocab_size=32, max_concurrent=4, timeout_seconds=10.0)
    rollouts = Rollouts(sampler, build_character_tokenizer("abc"), ByLetter(), max_prompt_tokens=8)
    for version in (1, 2):
        asyncio.run(rollouts.push_weights({}, version))
        assert server.version == weights.name
        groups = collect(rollouts, PROBLEMS, 2, Sampling(4))
        assert [len(group.generations) for group in groups] == [2, 2, 2]
        assert {y.weight_version for group in groups for y in group.generations} == {version}
        assert {y.text for group in groups for y in group.generations} <= set("abc")
    assert rollouts.metrics() == {
        "rollouts/server_failures": 0.0,
        "rollouts/resampled": 1.0,
        "rollouts/invalid_responses": 0.0,
    }
    assert server.num_answers == 13
