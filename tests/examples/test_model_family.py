"""Tests of the model family in docs/how_to/extend.md: Ministral, which has the network of Llama."""

import dataclasses
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from extending import FILES
from flax import nnx
from safetensors.numpy import load_file, save_file

from poly_epo_jax.model.architectures import ARCHITECTURES
from poly_epo_jax.model.hf import load_params, read_model_config, save_pretrained
from poly_epo_jax.model.transformer import abstract_model

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "sliding_window": None,
}


@pytest.fixture(autouse=True)
def my_config(tmp_path: Path) -> Iterator[None]:
    """Runs the configuration file, as --config=my_family.py does, and removes its entries after the test."""
    known = dict(ARCHITECTURES)
    (tmp_path / "my_family.py").write_text(FILES["my_family.py"])
    runpy.run_path(str(tmp_path / "my_family.py"))
    yield
    ARCHITECTURES.clear()
    ARCHITECTURES.update(known)


def write_folder(folder: Path, **changes: Any) -> Path:
    """Writes a model folder in the format of transformers, with random tensors under the names of Ministral."""
    transformers.MinistralConfig(**SIZES | changes).save_pretrained(folder)
    rng = np.random.default_rng(0)
    width, kv_width, d, mlp = 4 * 6, 2 * 6, 16, 24
    layer = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (width, d),
        "self_attn.k_proj": (kv_width, d),
        "self_attn.v_proj": (kv_width, d),
        "self_attn.o_proj": (d, width),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (mlp, d),
        "mlp.up_proj": (mlp, d),
        "mlp.down_proj": (d, mlp),
    }
    shapes = {"model.embed_tokens.weight": (40, d), "model.norm.weight": (d,), "lm_head.weight": (40, d)}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    written = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(written))


def logits(folder: Path) -> jax.Array:
    """Returns the logits [12, V] of the model in the folder for twelve tokens."""
    config = read_model_config(folder, dtype="float32", attention="blockwise")
    model = nnx.merge(nnx.split(abstract_model(config))[0], load_params(folder, config))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, (1, 12)))
    hidden = model(tokens, jnp.arange(12)[None], jnp.ones_like(tokens))
    return hidden[0] @ model.head.T


def test_logits_equal_those_of_llama_with_the_same_weights(tmp_path: Path):
    folder = write_folder(tmp_path / "ministral")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "ministral"
    found = logits(folder)
    edit_config(folder, model_type="llama")
    np.testing.assert_array_equal(found, logits(folder))
    assert found.std() > 0.3


def test_weights_are_saved_in_the_format_of_the_family(tmp_path: Path):
    folder = write_folder(tmp_path / "ministral")
    config = read_model_config(folder)
    save_pretrained(tmp_path / "trained", load_params(folder, config), config, dtype="float32")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "trained")
    assert isinstance(theirs, transformers.MinistralConfig) and theirs.architectures == ["MinistralForCausalLM"]
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "trained"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor)


def test_unsupported_settings_are_rejected(tmp_path: Path):
    folder = write_folder(tmp_path / "ministral", sliding_window=4096)
    with pytest.raises(ValueError, match=r"layer_types.*sliding_attention"):
        read_model_config(folder)


def test_renamed_settings_and_tensors_are_read(tmp_path: Path):
    folder = write_folder(tmp_path / "ministral")
    expected = logits(folder)
    known = ARCHITECTURES["ministral"]
    table = known.weights["embed"]
    ARCHITECTURES["renamed"] = dataclasses.replace(
        known,
        config_keys=known.config_keys | {"mlp_size": "ffn_size"},
        weights=known.weights | {"embed": dataclasses.replace(table, name="model.tokens.weight")},
    )
    edit_config(folder, model_type="renamed", intermediate_size=None, ffn_size=24)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.tokens.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    np.testing.assert_array_equal(logits(folder), expected)
