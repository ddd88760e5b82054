"""Tests that `ServerSampler` works with another kind of server through its `Dialect`."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_servers import UNCHECKED
from fakes import PATIENCE, TINY, ByLetter, collect, sampler_counts, tiny_params

from poly_epo_jax.config.default import get_config
from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.model.architectures import ARCHITECTURES
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.rollouts import SAMPLERS, open_server
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.servers.client import ServerSampler
from poly_epo_jax.rollouts.servers.dialect import Dialect, Endpoint, ModelInfo, ServerCompletion, WeightSpan
from poly_epo_jax.rollouts.servers.served_weights import ServedWeights
from poly_epo_jax.rollouts.servers.weight_sync import DiskSync, WeightSync
from poly_epo_jax.rollouts.sglang.dialect import SGLANG
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.system.http_client import InvalidResponseError
from poly_epo_jax.types import Problem, Request, Sampling

URL = "other://server"
PROBLEMS = [Problem(name, name, "") for name in "abc"]
LINEAR = dict.fromkeys(("linear_key_heads", "linear_value_heads", "linear_key_dim", "linear_value_dim", "conv_size"), 2)


class Other:
    """A dialect without HTTP. Its first generation is aborted."""

    max_cache_block = 1

    def __init__(self):
        self.version, self.is_paused, self.is_asleep, self.num_answers = "initial", False, False, 0

    async def wait_for(self, url: str, seconds: float) -> None:
        assert url == URL

    async def probe(self, url: str) -> Endpoint:
        return Endpoint(url, is_router=False)

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
        assert not self.is_paused and not self.is_asleep
        return [self.answer(request, index) for index in indices]

    def answer(self, request: Request, index: int) -> ServerCompletion:
        self.num_answers += 1
        token = 2 + int(request.seeds[index]) % 3
        reason = None if self.num_answers == 1 else "stop"
        # One generation begins with older weights.
        weights = [WeightSpan(0, 1, "older" if self.num_answers == 2 else self.version), WeightSpan(1, 2, self.version)]
        return ServerCompletion(np.array([token, 1], np.int32), np.full(2, -1, np.float32), reason, weights)

    async def pause(self, client: httpx.AsyncClient, url: str, keep: bool = False) -> None:
        self.is_paused, self.is_asleep = True, False

    async def load_folder(self, client: httpx.AsyncClient, url: str, folder: Path, version: str) -> None:
        assert self.is_paused and folder.is_dir()
        self.version = version

    async def resume(self, client: httpx.AsyncClient, url: str) -> None:
        self.is_paused = False

    async def checksums(self, client: httpx.AsyncClient, url: str, skipped_layers: Sequence[int]) -> list[Any]:
        raise NotImplementedError

    async def rename_weights(self, client: httpx.AsyncClient, url: str, version: str) -> None:
        raise NotImplementedError

    async def sleep(self, client: httpx.AsyncClient, url: str) -> None:
        self.is_asleep = True


def test_generations_weight_updates_and_sleep_use_the_dialect(tmp_path: Path):
    server = Other()
    sync = DiskSync(tmp_path, "a run", TINY, "float32")
    assert isinstance(server, Dialect) and isinstance(sync, WeightSync)
    weights = ServedWeights(sync, server, UNCHECKED, PATIENCE, PATIENCE, sleeps=True)
    sampler = ServerSampler([URL], weights, (1,), vocab_size=32, max_concurrent=4, timeout_seconds=PATIENCE)
    rollouts = Rollouts(sampler, build_character_tokenizer("abc"), ByLetter(), max_prompt_tokens=8)
    for version in (1, 2):
        asyncio.run(rollouts.push_weights(tiny_params(version), version))
        assert server.version == weights.name
        groups = collect(rollouts, PROBLEMS, 2, Sampling(4))
        assert [len(group.generations) for group in groups] == [2, 2, 2]
        assert {version for group in groups for y in group.generations for version in y.weight_versions} == {version}
        assert {y.text for group in groups for y in group.generations} <= set("abc")
        asyncio.run(rollouts.sleep())
        assert server.is_asleep
    assert sampler_counts(rollouts) == {
        "rollouts/server_failures": 0.0,
        "rollouts/resampled": 2.0,
        "rollouts/invalid_responses": 1.0,
    }
    assert server.num_answers == 14
    sampler.close()


@pytest.mark.parametrize(
    ("weights", "flaw"),
    [
        ([WeightSpan(0, 3, "w")], ""),
        ([WeightSpan(0, 1, "w"), WeightSpan(1, 3, "w")], ""),
        ([WeightSpan(0, 1, "w"), WeightSpan(1, 3, "x")], ""),
        ([WeightSpan(0, 1, "v"), WeightSpan(1, 3, "w")], "with weights v and w instead of w or x"),
        ([WeightSpan(0, 2, "w")], "[0, 2], but it has 3 tokens"),
        ([WeightSpan(1, 3, "w")], "[1, 3], but"),
        ([WeightSpan(0, 4, "w"), WeightSpan(4, 3, "w")], "[0, 4, 4, 3], but"),
        ([WeightSpan(0, 1, "w"), WeightSpan(2, 3, "w")], "[0, 1, 2, 3], but"),
    ],
)
def test_each_token_must_have_accepted_weights(weights: list[WeightSpan], flaw: str):
    found = ServerCompletion(np.zeros(3, np.int32), np.zeros(3, np.float32), "length", weights).weight_flaw(["w", "x"])
    assert flaw in found and bool(flaw) == bool(found)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("mistral", {"windows": (39,)}, "sliding_window=39 .* 4[08] tokens.* set rollouts.name=vllm"),
        ("gemma3_text", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ("mistral", {"windows": (48,), "tie_word_embeddings": False}, ""),
        ("olmo3", {"windows": (9, 0)}, ""),
        ("gemma3_text", {"windows": (9, 0)}, ""),
        ("qwen3_5_text", {"linear_layers": (False, True)} | LINEAR, "layer_types .* set rollouts.name=vllm"),
        ("qwen3_5_text", {"linear_layers": (True, False)} | LINEAR, ""),
    ],
)
def test_networks_that_sglang_does_not_compute_are_rejected(
    family: str, settings: dict[str, Any], message: str, tmp_path: Path
):
    config = get_config()
    config.rollouts.update({"name": "sglang", "urls": "http://a", "weights_dir": str(tmp_path)})
    config.train.max_prompt_tokens, config.sampling.max_tokens = 8, 40
    network = ARCHITECTURES[family].switches | settings
    model, mesh = abstract_model(dataclasses.replace(TINY, family=family, **network)), make_mesh(1, 1, 1)

    def openings(name: str):
        config.rollouts.name = name
        read = read_config(config)
        yield lambda: SAMPLERS[name].open(model, mesh, (1,), read)
        yield lambda: open_server("http://a", model, (1,), read)

    for opening in openings("sglang"):
        if message:
            with pytest.raises(ConfigError, match=message):
                opening()
        else:
            opening().close()
    for opening in openings("vllm"):
        opening().close()


def test_sglang_omits_a_level_of_the_names_of_qwen3_5():
    digests = {f"model.layers.3.{name}.weight": name for name in ("qkv_proj", "q_norm", "self_attn.o_proj", "mlp.gate")}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"ranks": [{"checksums": digests}]})

    async def checksums() -> Any:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await SGLANG.checksums(client, "http://a", ())

    names = ("self_attn.qkv_proj", "self_attn.q_norm", "self_attn.o_proj", "mlp.gate")
    assert [list(rank) for rank in asyncio.run(checksums())] == [[f"model.layers.3.{name}.weight" for name in names]]
