"""Tests linear attention with a real SGLang server, whose operators for CPUs are in third_party/sglang/cpu_shim."""

import asyncio
import dataclasses

import numpy as np
import pytest
from fakes import TINY, TINY_ALPHABET, ByLetter, collect, tiny_params, tiny_problems, trainer_logprobs
from sglang_servers import STARTED_WITHIN, SGLangServer, require_sglang, running

from poly_epo_jax.model import hf
from poly_epo_jax.model.architectures import ARCHITECTURES
from poly_epo_jax.model.rope import Rope
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.servers.client import ServerSampler
from poly_epo_jax.rollouts.servers.content_check import ContentCheck
from poly_epo_jax.rollouts.servers.served_weights import ServedWeights
from poly_epo_jax.rollouts.servers.weight_reference import WeightReference
from poly_epo_jax.rollouts.servers.weight_sync import DiskSync
from poly_epo_jax.rollouts.sglang.dialect import SGLANG
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.types import Sampling

TOKENIZER = build_character_tokenizer(TINY_ALPHABET)
STOP_IDS = (1, 14)
QWEN3_5 = dataclasses.replace(
    TINY,
    **ARCHITECTURES["qwen3_5_text"].switches,
    family="qwen3_5_text",
    mlp_size=32,  # SGLang pads other sizes.
    num_layers=4,
    tie_word_embeddings=False,  # test_sglang.py serves tied embeddings.
    ropes=(Rope(fraction=0.25),),
    linear_layers=(True, True, True, False),
    linear_key_heads=2,
    linear_value_heads=4,
    linear_key_dim=16,
    linear_value_dim=16,
    conv_size=4,
    norm_eps=1e-2,  # The norm of outputs close to 0 would amplify rounding errors a thousandfold.
)
MODEL = abstract_model(QWEN3_5)


@pytest.mark.slow
def test_generations_match_the_trainer_after_each_update(tmp_path, capsys):
    require_sglang()
    params = tiny_params(9, MODEL)
    hf.save_pretrained(tmp_path / "model", params, QWEN3_5, dtype="float32", eos_token_id=1, tokenizer=TOKENIZER)
    reference = WeightReference(MODEL, make_mesh(1, 1, 1), "float32")
    check = ContentCheck(SGLANG, reference, 64, QWEN3_5.vocab_size, STOP_IDS)
    sync = DiskSync(tmp_path / "weights", "a run", QWEN3_5, "float32")
    weights = ServedWeights(sync, SGLANG, check, STARTED_WITHIN, STARTED_WITHIN)
    limits = {"vocab_size": QWEN3_5.vocab_size, "max_concurrent": 64, "timeout_seconds": STARTED_WITHIN}
    server = SGLangServer(tmp_path / "model", tmp_path / "log", "--disable-overlap-schedule")
    with running([server]):
        sampler = ServerSampler([server.url], weights, STOP_IDS, **limits)
        rollouts = Rollouts(sampler, TOKENIZER, ByLetter(), 40)
        for version in (1, 2):
            asyncio.run(rollouts.push_weights(tiny_params(version, MODEL), version))
            groups = collect(rollouts, tiny_problems(6, 40), 4, Sampling(24))
            trainer, found = trainer_logprobs(version, groups, 1.0, MODEL)
            assert len(trainer) > 50 and trainer.std() > 0.5
            np.testing.assert_allclose(found, trainer, rtol=0, atol=1e-4)
        sampler.close()
    assert f"checksums of {len(reference.tensors)} tensors ({len(reference.tensors)} equal" in capsys.readouterr().err
