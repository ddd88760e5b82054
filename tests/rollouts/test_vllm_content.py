"""Tests the verification of weight updates with a real vLLM server that does not update its output head.

On CPUs, vLLM keeps the old output head of a model with tied embeddings, but it reports the new weights.
"""

import asyncio
import dataclasses
from pathlib import Path

import pytest
from fakes import tiny_params
from policy_servers import adam_step
from sglang_servers import STARTED_WITHIN, running
from vllm_servers import TOKENIZER, UNTIED, VLLMServer, require_vllm

from poly_epo_jax.model import hf
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.rollouts.servers.client import ServerSampler
from poly_epo_jax.rollouts.servers.content_check import ContentCheck
from poly_epo_jax.rollouts.servers.served_weights import ServedWeights
from poly_epo_jax.rollouts.servers.weight_reference import WeightReference
from poly_epo_jax.rollouts.servers.weight_sync import DiskSync
from poly_epo_jax.rollouts.vllm import VLLM
from poly_epo_jax.system.http_client import ServerError

TIED = dataclasses.replace(UNTIED, tie_word_embeddings=True)
MODEL = abstract_model(TIED)
STOP_IDS = (1, 14)
CONTEXT = 512


def sampler_of(url: str, folder: Path) -> ServerSampler:
    dialect = VLLM(TIED.vocab_size, CONTEXT)
    reference = WeightReference(MODEL, make_mesh(1, 1, 1), "float32")
    check = ContentCheck(dialect, reference, CONTEXT, TIED.vocab_size, STOP_IDS)
    weights = ServedWeights(DiskSync(folder, "a run", TIED, "float32"), dialect, check, STARTED_WITHIN, STARTED_WITHIN)
    limits = {"vocab_size": TIED.vocab_size, "max_concurrent": 16, "timeout_seconds": STARTED_WITHIN}
    return ServerSampler([url], weights, STOP_IDS, **limits)


@pytest.mark.slow
def test_old_weights_and_an_old_output_head_are_detected(tmp_path, monkeypatch):
    require_vllm()
    params = tiny_params(1, MODEL)
    hf.save_pretrained(tmp_path / "model", params, TIED, dtype="float32", eos_token_id=1, tokenizer=TOKENIZER)

    async def only_name(self, client, url, folder, version):
        await self.rename_weights(client, url, version)

    with running([VLLMServer(tmp_path / "model", tmp_path / "log", "--max-model-len", str(CONTEXT))]) as (server,):
        sampler = sampler_of(server.url, tmp_path / "weights")
        asyncio.run(sampler.push_weights(params, 1))
        counts = sampler.metrics()
        assert counts["rollouts/bytes_proofs"] == counts["rollouts/trainer_proofs"] == 1
        params = adam_step(params, 1)
        with monkeypatch.context() as patch:
            patch.setattr(VLLM, "load_folder", only_name)
            with pytest.raises(ServerError, match="tensors have other bytes than the trainer's, such as"):
                asyncio.run(sampler.push_weights(params, 2))
        asyncio.run(sampler.push_weights(params, 3))
        assert sampler.metrics()["rollouts/change_proofs"] == 1
        with pytest.raises(ServerError, match="differ from the trainer's by"):
            asyncio.run(sampler.push_weights(tiny_params(2, MODEL), 4))
        sampler.close()
