"""Compares the model and the embedded sampler with transformers on torch."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from fakes import TINY, tiny_params, tiny_problems
from flax import nnx
from safetensors.numpy import load_file, save_file
from samplers import MAX_PROMPT, MAX_TOKENS, STOP_IDS, TOKENIZER, generate, make_rollouts, token_ids
from test_hf import FLOAT32, SMALL, assert_trees_equal, random_params

from poly_epo_jax.model import hf
from poly_epo_jax.model.architectures import ARCHITECTURES
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.hf import load_params, read_model_config, save_pretrained
from poly_epo_jax.model.rope import Rope
from poly_epo_jax.model.transformer import Transformer

if os.environ.get("POLY_EPO_REQUIRE_TORCH"):
    import torch  # pyright: ignore[reportMissingImports]
else:
    torch = pytest.importorskip(
        "torch", reason="torch is not installed; run bash launch/test.sh all, which installs it for CPUs"
    )

torch.set_num_threads(1)
pytestmark = pytest.mark.slow  # test_references.py compares all families with stored results of torch.


def draw_config(index):
    """Draws one of ten configurations. They cover all families with 1, 2 and 4 key heads for 4 query heads."""
    rng = np.random.default_rng(index)
    family = ("qwen3", "qwen2", "llama")[index % 3]
    heads = 4
    hidden_size = int(rng.choice([24, 32, 40]))
    return ModelConfig(
        vocab_size=int(rng.integers(30, 80)),
        hidden_size=hidden_size,
        mlp_size=int(rng.integers(20, 60)),
        num_layers=int(rng.integers(1, 4)),
        num_heads=heads,
        num_kv_heads=(1, heads, 2)[index // 3 % 3],
        head_dim=hidden_size // heads if family == "qwen2" else int(rng.choice([4, 14, 16])),
        ropes=(Rope(float(10 ** rng.uniform(2, 6))),),
        norm_eps=float(rng.choice([1e-6, 1e-5, 1e-2])),
        max_position=64,
        tie_word_embeddings=bool(rng.random() < 0.5),
        family=family,
        **ARCHITECTURES[family].switches,
        **FLOAT32,
    )


def random_transformer(config, seed=0):
    """Creates a transformers model of the same architecture with random weights."""
    shapes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.ropes[0].theta},
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.qk_norm:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shapes, head_dim=config.head_dim))
    elif config.attention_bias:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shapes))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shapes, head_dim=config.head_dim))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.mul_(parameter.ndim == 1).add_(scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@functools.partial(jax.jit, static_argnums=0)
def compute_logits(config, params, tokens):
    model = nnx.merge(nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))[0], params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return model(tokens, positions, jnp.ones_like(tokens)) @ model.head.T


def assert_same_logits(config, params, transformer):
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 13))
    with torch.no_grad():
        expected = transformer(torch.as_tensor(tokens)).logits.numpy()
    assert expected.std() > 0.3
    np.testing.assert_allclose(compute_logits(config, params, jnp.asarray(tokens)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("index", range(10))
def test_folders_saved_by_transformers_give_the_same_logits(index, tmp_path):
    config, folder = draw_config(index), tmp_path / "model"
    transformer = random_transformer(config, seed=index)
    transformer.save_pretrained(folder, max_shard_size="20KB" if index % 2 else "5GB")
    assert (folder / "model.safetensors.index.json").exists() == bool(index % 2)
    read = read_model_config(folder, **FLOAT32)
    assert read == config
    assert_same_logits(read, load_params(folder, read), transformer)


@pytest.mark.parametrize("index", range(10))
def test_transformers_gives_the_same_logits_for_exported_folders(index, tmp_path):
    config, folder = draw_config(index), tmp_path / "model"
    params = random_params(config, seed=index)
    save_pretrained(folder, params, config, dtype="float32", max_shard_bytes=20_000 if index % 2 else 5 * 10**9)
    assert (folder / "model.safetensors.index.json").exists() == bool(index % 2)
    transformer = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert transformer.dtype == torch.float32
    assert_same_logits(config, params, transformer)
    assert read_model_config(folder, **FLOAT32) == config
    assert_trees_equal(load_params(folder, config), params)


def test_transformers_ignores_rotary_frequencies_and_keeps_another_head_of_a_tied_model(tmp_path):
    params, file = random_params(SMALL), tmp_path / "model/model.safetensors"
    save_pretrained(tmp_path / "model", params, SMALL, dtype="float32")
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    save_file(load_file(file) | buffers, file, metadata={"format": "pt"})
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert_same_logits(SMALL, load_params(tmp_path / "model", SMALL), load(tmp_path / "model"))
    head = {"lm_head.weight": load_file(file)["model.embed_tokens.weight"][::-1].copy()}
    save_file(load_file(file) | head, file, metadata={"format": "pt"})
    untied = dataclasses.replace(SMALL, tie_word_embeddings=False)
    assert_same_logits(untied, load_params(tmp_path / "model", untied), load(tmp_path / "model"))
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        load_params(tmp_path / "model", SMALL)


def test_bfloat16_files_contain_rounded_weights(tmp_path):
    config = dataclasses.replace(SMALL, tie_word_embeddings=False)
    params = random_params(config)
    save_pretrained(tmp_path / "float32", params, config, dtype="float32")
    save_pretrained(tmp_path / "bfloat16", params, config)
    load = transformers.AutoModelForCausalLM.from_pretrained
    rounded, exact = load(tmp_path / "bfloat16").state_dict(), load(tmp_path / "float32").state_dict()
    assert rounded.keys() == exact.keys()
    for name, tensor in rounded.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, exact[name].to(torch.bfloat16)), name
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert_trees_equal(load_params(tmp_path / "bfloat16", config), expected)


@pytest.mark.parametrize("written", ["float16", "bfloat16"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_loaded_weights_have_the_param_dtype(written, param_dtype, tmp_path):
    transformer = random_transformer(SMALL).to(getattr(torch, written))
    transformer.save_pretrained(tmp_path)
    params = load_params(tmp_path, read_model_config(tmp_path, param_dtype=param_dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(param_dtype)}
    expected = transformer.model.embed_tokens.weight.detach().to(getattr(torch, param_dtype)).float().numpy()
    np.testing.assert_array_equal(params["embed"].astype(jnp.float32), expected)


def test_greedy_generations_match_transformers(tmp_path):
    params = tiny_params()
    hf.save_pretrained(tmp_path / "model", params, TINY, dtype="float32")
    transformer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    problems = tiny_problems(30, MAX_PROMPT, seed=1)
    found = generate(make_rollouts(), problems, 1, temperature=0.0)
    for problem, group in zip(problems, found, strict=True):
        ids = TOKENIZER(problem.prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = transformer.generate(  # pyright: ignore[reportAttributeAccessIssue]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                eos_token_id=list(STOP_IDS),
                pad_token_id=0,
            )
        assert group.generations[0].token_ids.tolist() == out[0, ids.shape[1] :].tolist()
    reasons = [group.generations[0].finish_reason for group in found]
    assert min(reasons.count("stop"), reasons.count("length")) >= 8
    assert len({tuple(ids) for (ids,) in token_ids(found)}) > 20
