"""Reads and writes Hugging Face model folders, with the names and layouts of architectures.py.

A model folder has the format of transformers: config.json with model.safetensors, or with several such files and their
index (hf_files.py). Host memory holds one stacked weight at a time while loading, and a few files while saving.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerBase

from poly_epo_jax.model.architectures import ARCHITECTURES, MISSING_FEATURES, VISION_WRAPPERS, Architecture, Weight
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.hf_files import (
    language_tensor_names,
    model_files,
    new_folder,
    open_tensors,
    write_tensors,
    write_tokenizer,
)
from poly_epo_jax.model.layer_settings import MAX_STACKED
from poly_epo_jax.model.lora import merge_adapter, without_adapter
from poly_epo_jax.model.rope import Yarn, check_setting
from poly_epo_jax.model.transformer import abstract_model, declared_weights, param_shapes
from poly_epo_jax.system.digests import write_digests
from poly_epo_jax.system.json_files import read_object, write_json
from poly_epo_jax.types import Params


class Tensor(NamedTuple):
    """Location of a Hugging Face tensor in the parameter tree.

    Attributes:
      weight: Entry of the family's weights.
      path: Dotted path of the parameter.
      index: Index of the tensor in the parameter: its layer, or its layer and expert. Empty for the complete parameter.
      shape: Shape of the indexed part of the parameter.
    """

    weight: Weight
    path: str
    index: Any
    shape: tuple[int, ...]


def read_model_config(path: str | Path, **overrides: Any) -> ModelConfig:
    """Reads the configuration of a model folder.

    Args:
      path: Model folder.
      **overrides: Further fields of ModelConfig, such as dtype, param_dtype and remat.

    Returns:
      The model configuration.

    Raises:
      FileNotFoundError: If `path` is not a model folder.
      ValueError: If config.json is not a JSON object or is incomplete, or if the model is not supported.
    """
    file = _folder(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no config.json; specify a Hugging Face model folder.")
    content = read_object(file, "create or download the model folder again")
    if content.get("model_type") in VISION_WRAPPERS:
        check_setting(f"{file}: text_config", content.get("text_config"), Mapping[str, Any])
        of_both = {key: content[key] for key in ("tie_word_embeddings",) if key in content}
        content = content["text_config"] | of_both | {"model_type": VISION_WRAPPERS[content["model_type"]]}
    written = {key: value for key, value in content.items() if value is not None}
    family = str(written.get("model_type"))
    if family not in ARCHITECTURES:
        choices, names = " or ".join(ARCHITECTURES), content.get("architectures")
        advice = f"choose a {choices} model, see docs/reference/models.md."
        if family in MISSING_FEATURES:
            name = names[0] if isinstance(names, list) and names else family
            raise ValueError(f"{file}: {name} requires {MISSING_FEATURES[family]}, which is not supported; {advice}")
        raise ValueError(f"{file}: model_type {family!r} is not supported; {advice}")
    if "quantization_config" in written:
        raise ValueError(
            f"{file}: the weights are quantized (quantization_config: {str(written['quantization_config'])[:80]}), "
            "which is not supported; choose the model in BF16, F16 or F32."
        )
    architecture = ARCHITECTURES[family]
    for key in ("rope_scaling", "rope_parameters"):
        check_setting(f"{file}: {key}", written.get(key, {}), Mapping[str, Any])
    unsupported = [
        key
        for key, is_unsupported in architecture.unsupported.items()
        if key in written and is_unsupported(written[key])
    ]
    if unsupported:
        value = written[unsupported[0]]
        raise ValueError(f"{file}: {unsupported[0]} {value!r} is not supported; choose a {family} model without it.")
    shapes = _shapes(file, written, architecture)
    try:
        network = architecture.network(content)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    # Folders of models that were extended with YaRN may still state their original maximum length.
    scalings = [rope.scaling for rope in network["ropes"] if isinstance(rope.scaling, Yarn)]
    extended = [int(scaling.factor * scaling.original_max_position_embeddings) for scaling in scalings]
    shapes["max_position"] = max([shapes["max_position"], *extended])
    return ModelConfig(**shapes, **network, family=family, **overrides)


def load_params(path: str | Path, config: ModelConfig, shardings: Params | None = None) -> Params:
    """Loads the weights of a model folder.

    Args:
      path: Model folder.
      config: Model configuration. Its adapter is ignored.
      shardings: Sharding of each weight. If None, the weights are placed on the default device.

    Returns:
      The weights without an adapter, with dtype `config.param_dtype`.

    Raises:
      FileNotFoundError: If `path` is not a folder with safetensors files, or if a file in its index is missing.
      ValueError: If a file is corrupted, if a tensor is missing or unexpected, does not have the shape that `config`
        requires, is not a 16-bit or 32-bit float, or contains NaN or infinity, or if the head of a model with tied
        embeddings differs from the embedding.
    """
    config = without_adapter(config)
    tensors, opened = _tensors(config), open_tensors(_folder(path))
    source = {name: opened[written] for name, written in language_tensor_names(opened).items()}
    _check_tensors(path, config, tensors, source)

    def load(key_path, leaf, sharding=None):
        host = np.empty(leaf.shape, leaf.dtype)
        for name, tensor in tensors.items():
            if tensor.path == _dotted(key_path):
                host[tensor.index] = tensor.weight.restore(source[name][:], tensor.shape)
        if sharding is None:
            weight = jnp.asarray(host)
        else:
            weight = jax.make_array_from_callback(host.shape, sharding, host.__getitem__)
        if not _is_finite(weight):
            raise ValueError(f"{path}: {_dotted(key_path)} contains NaN or infinity; download or save the model again.")
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
    tokenizer: PreTrainedTokenizerBase | Path | None = None,
    card: str = "",
) -> None:
    """Writes a model folder that transformers and the rollout servers can load.

    The folder is written under a temporary name and renamed at the end, so that a crash never leaves an incomplete
    folder at `path`.

    Args:
      path: Model folder to create.
      params: Weights of the model. An adapter is merged into the weights that it adapts.
      config: Model configuration.
      dtype: Type of the saved weights.
      max_shard_bytes: Maximum size of a weight file, in bytes, unless it holds a single tensor.
      eos_token_id: End-of-sequence tokens for config.json and generation_config.json. If None, the files contain null.
      pad_token_id: Padding token for config.json and generation_config.json. If None, the files contain null.
      tokenizer: Tokenizer to write to the folder, see `write_tokenizer`. Digests of the files are written only if a
        tokenizer is given, because folders without one are temporary.
      card: Text of README.md. If empty, the file is not written. It has no digest, because users edit it.

    Raises:
      OSError: If the folder cannot be written.
      FileExistsError: If `path` already exists.
      ValueError: If the switches in `config` differ from the switches of its family.
    """
    token_ids = {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    description, tensors = _config_json(config, dtype) | token_ids, _tensors(config)
    sizes = {name: math.prod(tensor.shape) * jnp.dtype(dtype).itemsize for name, tensor in tensors.items()}

    def fetch(names: Sequence[str]) -> dict[str, np.ndarray]:
        return jax.device_get({name: _export(config, params, tensors[name], dtype) for name in names})

    with new_folder(Path(path)) as folder:
        write_json(folder / "config.json", description)
        write_json(folder / "generation_config.json", token_ids)
        write_tensors(folder, sizes, fetch, max_shard_bytes)
        if tokenizer is not None:
            write_tokenizer(tokenizer, folder)
            write_digests(folder)
        if card:
            (folder / "README.md").write_text(card, encoding="utf-8")


def tensor_names(config: ModelConfig) -> list[str]:
    """Returns the Hugging Face names of all tensors. Adapters are not among them."""
    return list(_tensors(config))


def exported_tensors(
    params: Params, config: ModelConfig, dtype: str, names: Sequence[str] | None = None
) -> Iterator[tuple[str, jax.Array]]:
    """Yields tensors in the Hugging Face layout, unsharded on the first local device.

    Args:
      params: Weights of the model. An adapter is merged into the weights that it adapts.
      config: Model configuration.
      dtype: Type of the tensors.
      names: Hugging Face names of the tensors, in order. If None, all tensors are yielded.

    Yields:
      The Hugging Face name and the array of each tensor.
    """
    device, tensors = jax.local_devices()[0], _tensors(config)
    for name in tensors if names is None else names:
        yield name, jax.device_put(_export(config, params, tensors[name], dtype), device)


@jax.jit
def _is_finite(weight: jax.Array) -> jax.Array:
    return jnp.isfinite(weight).all()


def _folder(path: str | Path) -> Path:
    if not Path(path).is_dir():
        raise FileNotFoundError(f"{path} is not a folder; correct the path, or download the model first.")
    model_files(Path(path))
    return Path(path)


def _shapes(file: Path, written: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Returns the ModelConfig fields that config.json sets. Missing keys have the defaults of transformers.

    Raises:
      ValueError: If a key without a default is missing, a value has the wrong type, or the head sizes do not match.
    """
    config_keys = architecture.config_keys
    found = {field: written[key] for field, key in config_keys.items() if key in written}
    types = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
    for field, value in found.items():
        check_setting(f"{file}: {config_keys[field]}", value, types[field])
    if found.get("num_layers", 0) > MAX_STACKED:
        raise ValueError(
            f"{file}: {config_keys['num_layers']}={found['num_layers']} must be at most {MAX_STACKED}; correct it."
        )
    heads = found.get("num_heads", architecture.defaults.get("num_heads", 1))
    defaults = {"num_kv_heads": heads}
    if found.get("hidden_size", 0) % heads == 0 and written["model_type"] != "qwen3":
        defaults["head_dim"] = found.get("hidden_size", 0) // heads
    shapes = defaults | architecture.defaults | found
    for field, key in config_keys.items():
        if field not in shapes:
            raise ValueError(f"{file} does not contain {key!r}; add it.")
    if heads % shapes["num_kv_heads"]:
        kv_key, key = (config_keys[field] for field in ("num_kv_heads", "num_heads"))
        raise ValueError(f"{file}: {kv_key}={shapes['num_kv_heads']} must divide {key}={heads}; correct it.")
    return shapes


def _dotted(key_path: Any) -> str:
    return jax.tree_util.keystr(key_path, simple=True, separator=".")


def _tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Returns the tensors of a model folder, keyed by Hugging Face name. Adapters are not among them."""
    tensors, weights = {}, ARCHITECTURES[config.family].weights
    for path, param in declared_weights(without_adapter(config)).items():
        weight = weights[path]
        num_stacked = weight.name.count("{}")  # Axes of layers and experts.
        layers = config.stacks.get(path.partition(".")[0], ())
        for index in itertools.product(*map(range, param.shape[:num_stacked])):
            name = weight.name.format(*(layers[i] for i in index[:1]), *index[1:])
            tensors[name] = Tensor(weight, path, index, param.shape[num_stacked:])
    return tensors


def _check_tensors(
    path: str | Path, config: ModelConfig, tensors: dict[str, Tensor], source: Mapping[str, Any]
) -> None:
    head, embedding = (ARCHITECTURES[config.family].weights[path].name for path in ("untied_head", "embed"))
    for name in source:
        # Old versions of transformers saved the rotary frequencies. All versions compute them from config.json.
        if name not in tensors and name != head and not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(f"{path} has an unexpected tensor {name}; use the config.json of the same model.")
    for name, tensor in tensors.items():
        if name not in source:
            raise ValueError(
                f"{path} has no tensor {name}; download the complete model, or use the config.json of the same model."
            )
        found, expected = source[name], tensor.weight.hf_shape(tensor.shape)
        if tuple(found.get_shape()) != expected:
            raise ValueError(
                f"{path}: {name} has shape {tuple(found.get_shape())}, but config.json requires {expected}."
            )
        if found.get_dtype() not in ("BF16", "F16", "F32"):
            raise ValueError(f"{path}: {name} has type {found.get_dtype()}; choose a model in BF16, F16 or F32.")
    has_both = config.tie_word_embeddings and head in source
    if has_both and not np.array_equal(source[head][:], source[embedding][:]):
        raise ValueError(
            f"{path}: {head} differs from {embedding}, but config.json sets tie_word_embeddings. transformers 4 and "
            f"5 load such folders as different models; set tie_word_embeddings to false, or remove {head}."
        )


def _config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    architecture = ARCHITECTURES[config.family]
    description = {
        "architectures": [architecture.class_name],
        "model_type": config.family,
        **{key: getattr(config, field) for field, key in architecture.config_keys.items()},
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "dtype": dtype,
        "torch_dtype": dtype,  # transformers 4, and servers that use it, read this key.
        # Written explicitly because the default of Llama is a token id.
        "bos_token_id": None,
        **architecture.write(config),
    }
    network = architecture.network(description)
    found = {field: getattr(config, field) for field in network if getattr(config, field) != network[field]}
    if found:
        required = {field: network[field] for field in found}
        raise ValueError(f"A {config.family} model requires {required}, but has {found}; choose another family.")
    return description


def _export(config: ModelConfig, params: Params, tensor: Tensor, dtype: str) -> jax.Array:
    parent, _, name = tensor.path.rpartition(".")
    weight = merge_adapter(config, params[parent], name, tensor.index) if parent else params[name]
    return tensor.weight.export(jnp.asarray(weight, jnp.dtype(dtype)))
