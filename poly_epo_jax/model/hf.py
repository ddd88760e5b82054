"""Reads and writes Hugging Face model folders, as architectures.py describes each family.

A model folder is what transformers writes: config.json with model.safetensors, or with several such files and their
index (hf_files.py). Weights pass through the host one stacked tensor (loading) or a few files (saving) at a time.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerBase

from poly_epo_jax.model.architectures import ARCHITECTURES, Weight
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.hf_files import new_folder, open_tensors, write_tensors
from poly_epo_jax.model.lora import merged, without_adapter
from poly_epo_jax.model.qwen3 import abstract_model, declared_weights, param_shapes
from poly_epo_jax.system.digests import write_digests
from poly_epo_jax.system.json_files import read_object, write_json
from poly_epo_jax.types import Params


class Tensor(NamedTuple):
    """Where a Hugging Face tensor lies in our tree: a weight, its path, the index there (a layer or all), our shape."""

    weight: Weight
    path: str
    index: Any
    ours: tuple[int, ...]


def read_config(path: str | Path, **overrides: Any) -> ModelConfig:
    """The shapes of the model in the folder `path`; `overrides` say how to compute (dtype, param_dtype, remat, ...).

    Raises:
      FileNotFoundError: `path` is not a model folder.
      ValueError: the model is not one that `model.qwen3` can compute.
    """
    file = _folder(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no config.json; give a Hugging Face model folder.")
    written = {
        key: value
        for key, value in read_object(file, "make or download the model folder again").items()
        if value is not None
    }
    family = str(written.get("model_type"))
    if family not in ARCHITECTURES:
        choices = " or ".join(ARCHITECTURES)
        raise ValueError(f"{file}: model_type {family!r} is not supported; choose a {choices} model.")
    architecture = ARCHITECTURES[family]
    rope = {"rope_theta": written.get("rope_theta", 1e4)}
    rope |= written.get("rope_scaling", {}) | written.get("rope_parameters", {})
    refused = [key for key, refuses in architecture.refuses.items() if key in written and refuses(written[key])]
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        refused.append("rope_scaling")
        written["rope_scaling"] = rope
    if refused:
        value = written[refused[0]]
        raise ValueError(f"{file}: {refused[0]} {value!r} is not supported; choose a {family} model without it.")
    shapes = _shapes(file, written, architecture.config_keys)
    return ModelConfig(
        **shapes, **architecture.switches, family=family, rope_theta=float(rope["rope_theta"]), **overrides
    )


def load_params(path: str | Path, config: ModelConfig, shardings: Params | None = None) -> Params:
    """The weights in the folder `path`, as `config.param_dtype`, laid out by `shardings` (else on the default device).

    They include no adapter, whatever `config` says.

    Raises:
      FileNotFoundError: `path` is not a folder with safetensors files.
      ValueError: a tensor is missing, unexpected, of another shape than `config` says, not of 16 or 32 bit floats, or
        not finite.
    """
    config = without_adapter(config)
    tensors, source = _tensors(config), open_tensors(_folder(path))
    _check_tensors(path, config, tensors, source)

    def load(key_path, leaf, sharding=None):
        host = np.empty(leaf.shape, leaf.dtype)
        for name, tensor in tensors.items():
            if tensor.path == _dotted(key_path):
                host[tensor.index] = tensor.weight.restore(source[name].get_tensor(name), tensor.ours)
        if sharding is None:
            weight = jnp.asarray(host)
        else:
            weight = jax.make_array_from_callback(host.shape, sharding, host.__getitem__)
        if not _is_finite(weight):
            raise ValueError(f"{path}: {_dotted(key_path)} holds NaN or infinity; get or save the model anew.")
        return weight

    shapes = param_shapes(abstract_model(config))
    return jax.tree.map_with_path(load, shapes, *([] if shardings is None else [shardings]))


def save_pretrained(
    path: str | Path,
    params: Params,
    config: ModelConfig,
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5 * 10**9,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    card: str = "",
) -> None:
    """Writes a model folder that transformers and the servers read. It appears whole or, after a crash, not at all.

    An adapter is merged into the weights that it adapts.

    Args:
      tokenizer: written too. A folder with a tokenizer is there to stay, and gets digests of its files.
      card: the text of its README.md; empty: none.

    Raises:
      OSError: it cannot be written.
      FileExistsError: `path` is there already.
      ValueError: `config` is not of its family.
    """
    token_ids = {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    description, tensors = _config_json(config, dtype) | token_ids, _tensors(config)
    sizes = {name: math.prod(tensor.ours) * jnp.dtype(dtype).itemsize for name, tensor in tensors.items()}

    def fetch(names: Sequence[str]) -> dict[str, np.ndarray]:
        return jax.device_get({name: _export(config, params, tensors[name], dtype) for name in names})

    with new_folder(Path(path)) as folder:
        write_json(folder / "config.json", description)
        write_json(folder / "generation_config.json", token_ids)
        write_tensors(folder, sizes, fetch, max_shard_bytes)
        if card:
            (folder / "README.md").write_text(card, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
            write_digests(folder)


def exported_tensors(params: Params, config: ModelConfig, dtype: str) -> Iterator[tuple[str, jax.Array]]:
    """Every tensor by its Hugging Face name and in that layout, as `dtype`, whole on the first device.

    An adapter is merged into the weights that it adapts.
    """
    device = jax.local_devices()[0]
    for name, tensor in _tensors(config).items():
        yield name, jax.device_put(_export(config, params, tensor, dtype), device)


@jax.jit
def _is_finite(weight: jax.Array) -> jax.Array:
    return jnp.isfinite(weight).all()


def _folder(path: str | Path) -> Path:
    if not Path(path).is_dir():
        raise FileNotFoundError(f"{path} is not a folder; download the model first and give its local folder.")
    return Path(path)


def _shapes(file: Path, written: Mapping[str, Any], config_keys: Mapping[str, str]) -> dict[str, Any]:
    """The fields of ModelConfig that config.json sets, with transformers' defaults for what old files leave out."""
    found = {field: written[key] for field, key in config_keys.items() if key in written}
    heads = found.get("num_heads", 1)
    defaults = {
        "num_kv_heads": heads,
        "head_dim": found.get("hidden_size", 0) // heads,
        "norm_eps": 1e-6,
        "tied_head": False,
    }
    shapes = defaults | found
    for field, key in config_keys.items():
        if field not in shapes:
            raise ValueError(f"{file} does not say {key!r}; add it.")
    return shapes


def _dotted(key_path: Any) -> str:
    return jax.tree_util.keystr(key_path, simple=True, separator=".")


def _tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Every tensor of the model by its Hugging Face name; an adapter has no place of its own there."""
    tensors, weights = {}, ARCHITECTURES[config.family].weights
    for path, param in declared_weights(without_adapter(config)).items():
        weight = weights[path]
        if path.startswith("layers."):
            for layer in range(config.num_layers):
                tensors[weight.name.format(layer)] = Tensor(weight, path, layer, param.shape[1:])
        else:
            tensors[weight.name] = Tensor(weight, path, ..., param.shape)
    return tensors


def _check_tensors(path: str | Path, config: ModelConfig, tensors: dict[str, Tensor], source: dict[str, Any]) -> None:
    tied = {ARCHITECTURES[config.family].weights["untied_head"].name} if config.tied_head else set()
    for name in source:
        if name not in tensors.keys() | tied:
            raise ValueError(f"{path} has an unexpected {name}; the config describes another model.")
    for name, tensor in tensors.items():
        if name not in source:
            raise ValueError(f"{path} lacks {name}; it is incomplete, or the config describes another model.")
        found, expected = source[name].get_slice(name), tensor.weight.shape(tensor.ours)
        if tuple(found.get_shape()) != expected:
            raise ValueError(f"{path}: {name} has shape {tuple(found.get_shape())}, but the config implies {expected}.")
        if found.get_dtype() not in ("BF16", "F16", "F32"):
            raise ValueError(f"{path}: {name} is {found.get_dtype()}; choose a model in BF16, F16 or F32.")


def _config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    architecture = ARCHITECTURES[config.family]
    switches = {switch: getattr(config, switch) for switch in architecture.switches}
    if switches != architecture.switches:
        raise ValueError(f"A {config.family} model has {architecture.switches}, not {switches}; choose another family.")
    return {
        "architectures": [architecture.class_name],
        "model_type": config.family,
        **{key: getattr(config, field) for field, key in architecture.config_keys.items()},
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "dtype": dtype,
        # The same for transformers 4 and the servers of its time.
        "rope_theta": config.rope_theta,
        "torch_dtype": dtype,
        # Stated because Llama's default is a token.
        "bos_token_id": None,
    }


def _export(config: ModelConfig, params: Params, tensor: Tensor, dtype: str) -> jax.Array:
    room, _, name = tensor.path.rpartition(".")
    weight = merged(config, params[room], name, tensor.index) if room else params[name]
    return tensor.weight.export(jnp.asarray(weight, jnp.dtype(dtype)))
