"""The one map between our weights and Hugging Face's: a table of names and axes that loading and saving both read.

A model folder is what transformers writes: config.json beside model.safetensors, or beside several such files and
their index (hf_files.py). Weights pass through the host one stacked tensor (loading) or a few files (saving) at a time.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.hf_files import open_tensors, write_json, write_tensors
from poly_epo_jax.model.qwen3 import Qwen3
from poly_epo_jax.types import Params

# What tells the architectures apart, keyed by Hugging Face's model_type.
SWITCHES = {
    "qwen3": {"qk_norm": True, "attention_bias": False},
    "qwen2": {"qk_norm": False, "attention_bias": True},
    "llama": {"qk_norm": False, "attention_bias": False},
}

# ModelConfig's field: config.json's key.
CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "mlp_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "max_position": "max_position_embeddings",
    "tied_head": "tie_word_embeddings",
}


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight in both layouts: a letter per axis of ours (but that of the layers), a word per axis of theirs.

    "dnh" and "nh d" say that ours is [embed, heads, head_dim] and theirs [heads * head_dim, embed].
    """

    name: str
    ours: str
    theirs: str

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Their shape, given ours."""
        size = dict(zip(self.ours, ours, strict=True))
        return tuple(math.prod(size[letter] for letter in word) for word in self.theirs.split())

    def export(self, ours: Any) -> Any:
        """Theirs, an array of the same library."""
        order = [self.ours.index(letter) for letter in self._letters]
        return ours.transpose(order).reshape(self.shape(ours.shape))

    def restore(self, theirs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Ours, of the given shape: the inverse of `export`."""
        size = dict(zip(self.ours, shape, strict=True))
        order = [self._letters.index(letter) for letter in self.ours]
        return theirs.reshape([size[letter] for letter in self._letters]).transpose(order)

    @property
    def _letters(self) -> str:
        return self.theirs.replace(" ", "")


WEIGHTS = {
    "embed": Weight("model.embed_tokens.weight", "vd", "v d"),
    "layers.attention_norm": Weight("model.layers.{}.input_layernorm.weight", "d", "d"),
    "layers.q": Weight("model.layers.{}.self_attn.q_proj.weight", "dnh", "nh d"),
    "layers.k": Weight("model.layers.{}.self_attn.k_proj.weight", "dnh", "nh d"),
    "layers.v": Weight("model.layers.{}.self_attn.v_proj.weight", "dnh", "nh d"),
    "layers.o": Weight("model.layers.{}.self_attn.o_proj.weight", "nhd", "d nh"),
    "layers.q_norm": Weight("model.layers.{}.self_attn.q_norm.weight", "h", "h"),
    "layers.k_norm": Weight("model.layers.{}.self_attn.k_norm.weight", "h", "h"),
    "layers.q_bias": Weight("model.layers.{}.self_attn.q_proj.bias", "nh", "nh"),
    "layers.k_bias": Weight("model.layers.{}.self_attn.k_proj.bias", "nh", "nh"),
    "layers.v_bias": Weight("model.layers.{}.self_attn.v_proj.bias", "nh", "nh"),
    "layers.mlp_norm": Weight("model.layers.{}.post_attention_layernorm.weight", "d", "d"),
    "layers.gate": Weight("model.layers.{}.mlp.gate_proj.weight", "dm", "m d"),
    "layers.up": Weight("model.layers.{}.mlp.up_proj.weight", "dm", "m d"),
    "layers.down": Weight("model.layers.{}.mlp.down_proj.weight", "md", "d m"),
    "norm": Weight("model.norm.weight", "d", "d"),
    "untied_head": Weight("lm_head.weight", "vd", "v d"),
}


class Tensor(NamedTuple):
    """Where a tensor of theirs lies in our tree: a weight's path, the index there (a layer, or all), our shape."""

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
    written = {key: value for key, value in json.loads(file.read_text()).items() if value is not None}
    model_type = written.get("model_type")
    if model_type not in SWITCHES:
        raise ValueError(f"{file}: model_type {model_type!r} is not supported; choose a {' or '.join(SWITCHES)} model.")
    rope = {"rope_theta": written.get("rope_theta", 1e4)}
    rope |= written.get("rope_scaling", {}) | written.get("rope_parameters", {})
    supported = {
        "attention_bias": model_type == "qwen2" or not written.get("attention_bias"),
        "mlp_bias": not written.get("mlp_bias"),
        "hidden_act": written.get("hidden_act", "silu") == "silu",
        "use_sliding_window": not written.get("use_sliding_window"),
        "layer_types": "sliding_attention" not in written.get("layer_types", ()),
        "rope_scaling": rope.get("rope_type", rope.get("type", "default")) == "default",
    }
    for key, fine in supported.items():
        if not fine:
            value = rope if key == "rope_scaling" else written[key]
            raise ValueError(f"{file}: {key} {value!r} is not supported; choose a {model_type} model without it.")
    try:
        defaults = {
            "num_key_value_heads": written["num_attention_heads"],
            "head_dim": written["hidden_size"] // written["num_attention_heads"],
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        }
        shapes = {field: (defaults | written)[key] for field, key in CONFIG_KEYS.items()}
    except KeyError as missing:
        raise ValueError(f"{file} does not say {missing}; add it.") from None
    return ModelConfig(**shapes, **SWITCHES[model_type], rope_theta=float(rope["rope_theta"]), **overrides)


def load_params(path: str | Path, config: ModelConfig, shardings: Params | None = None) -> Params:
    """The weights in the folder `path`, as `config.param_dtype`, laid out by `shardings` (else on the default device).

    Raises:
      FileNotFoundError: `path` is not a folder with safetensors files.
      ValueError: a tensor is missing, unexpected, of another shape than `config` says, or not of 16 or 32 bit floats.
    """
    tensors, source = _tensors(config), open_tensors(_folder(path))
    _check_tensors(path, config, tensors, source)

    def load(key_path, leaf, sharding=None):
        host = np.empty(leaf.shape, leaf.dtype)
        for name, tensor in tensors.items():
            if tensor.path == _dotted(key_path):
                host[tensor.index] = WEIGHTS[tensor.path].restore(source[name].get_tensor(name), tensor.ours)
        if sharding is None:
            return jnp.asarray(host)
        return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)

    return jax.tree.map_with_path(load, _abstract_params(config), *([] if shardings is None else [shardings]))


def save_pretrained(
    path: str | Path,
    params: Params,
    config: ModelConfig,
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5 * 10**9,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
) -> None:
    """Writes a model folder that transformers and the servers read. It appears whole or, after a crash, not at all.

    Raises:
      OSError, SafetensorError: it cannot be written.
      FileExistsError: `path` is there already.
      ValueError: `config` is no Hugging Face architecture.
    """
    path, token_ids = Path(path), {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    if path.exists():
        raise FileExistsError(f"{path} exists already; choose another folder, or remove it first.")
    description = _config_json(config, dtype) | token_ids
    unfinished = path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_json(unfinished / "config.json", description)
    write_json(unfinished / "generation_config.json", token_ids)
    tensors, weights = _tensors(config), _by_path(params)
    sizes = {name: math.prod(tensor.ours) * jnp.dtype(dtype).itemsize for name, tensor in tensors.items()}

    def fetch(names: Sequence[str]) -> dict[str, np.ndarray]:
        return jax.device_get({name: _export(weights, tensors[name], jnp.dtype(dtype)) for name in names})

    write_tensors(unfinished, sizes, fetch, max_shard_bytes)
    unfinished.rename(path)


def exported_tensors(params: Params, config: ModelConfig, dtype: str) -> Iterator[tuple[str, jax.Array]]:
    """Every tensor by its Hugging Face name and in that layout, as `dtype`, whole on the first device."""
    weights, device = _by_path(params), jax.local_devices()[0]
    for name, tensor in _tensors(config).items():
        yield name, jax.device_put(_export(weights, tensor, jnp.dtype(dtype)), device)


def _folder(path: str | Path) -> Path:
    if not Path(path).is_dir():
        raise FileNotFoundError(f"{path} is not a folder; download the model first and give its local folder.")
    return Path(path)


def _abstract_params(config: ModelConfig) -> Params:
    return nnx.to_pure_dict(nnx.split(nnx.eval_shape(lambda: Qwen3(config, nnx.Rngs(0))))[1])


def _dotted(key_path: Any) -> str:
    return jax.tree_util.keystr(key_path, simple=True, separator=".")


def _tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Every tensor of the model by its name in Hugging Face's."""
    tensors = {}
    for key_path, leaf in jax.tree.leaves_with_path(_abstract_params(config)):
        path = _dotted(key_path)
        name = WEIGHTS[path].name
        if path.startswith("layers."):
            tensors |= {name.format(layer): Tensor(path, layer, leaf.shape[1:]) for layer in range(config.num_layers)}
        else:
            tensors[name] = Tensor(path, ..., leaf.shape)
    return tensors


def _check_tensors(path: str | Path, config: ModelConfig, tensors: dict[str, Tensor], source: dict[str, Any]) -> None:
    tied = {"lm_head.weight"} if config.tied_head else set()
    for name in source:
        if name not in tensors.keys() | tied:
            raise ValueError(f"{path} has an unexpected {name}; the config describes another model.")
    for name, tensor in tensors.items():
        if name not in source:
            raise ValueError(f"{path} lacks {name}; it is incomplete, or the config describes another model.")
        found, expected = source[name].get_slice(name), WEIGHTS[tensor.path].shape(tensor.ours)
        if tuple(found.get_shape()) != expected:
            raise ValueError(f"{path}: {name} has shape {tuple(found.get_shape())}, but the config implies {expected}.")
        if found.get_dtype() not in ("BF16", "F16", "F32"):
            raise ValueError(f"{path}: {name} is {found.get_dtype()}; choose a model in BF16, F16 or F32.")


def _config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    switches = {"qk_norm": config.qk_norm, "attention_bias": config.attention_bias}
    if switches not in SWITCHES.values():
        raise ValueError(f"No Hugging Face architecture has {switches}; choose those of {SWITCHES}.")
    model_type = next(key for key, value in SWITCHES.items() if value == switches)
    return {
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "model_type": model_type,
        **{key: getattr(config, field) for field, key in CONFIG_KEYS.items()},
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "dtype": dtype,
        # The same for transformers 4 and servers of its time.
        "rope_theta": config.rope_theta,
        "torch_dtype": dtype,
        # Llama's default is a token.
        "bos_token_id": None,
    }


def _by_path(params: Params) -> dict[str, Any]:
    return {_dotted(key_path): leaf for key_path, leaf in jax.tree.leaves_with_path(params)}


def _export(weights: dict[str, Any], tensor: Tensor, dtype: np.dtype) -> jax.Array:
    return WEIGHTS[tensor.path].export(jnp.asarray(weights[tensor.path][tensor.index], dtype))
