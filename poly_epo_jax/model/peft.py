"""Saves adapters in the format of Hugging Face PEFT: adapter_config.json and adapter_model.safetensors.

Servers with adapter support load the same folder (`--lora-paths` of SGLang, `--lora-modules` of vLLM).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poly_epo_jax.model.architectures import ARCHITECTURES
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.hf_files import new_folder, save_tensors
from poly_epo_jax.system.digests import write_digests
from poly_epo_jax.system.json_files import write_json
from poly_epo_jax.types import Params

PREFIX = "base_model.model."
"""Prefix of every tensor name. The model class of PEFT wraps the base model twice."""


def save_adapter(
    path: str | Path,
    params: Params,
    config: ModelConfig,
    base: str,
    dtype: str = "float32",
    card: str = "",
    names: Mapping[str, str] | None = None,
) -> None:
    """Writes the adapter of a policy.

    The folder is written under a temporary name and renamed at the end, so that a crash never leaves an incomplete
    folder at `path`.

    Args:
      path: Folder to create.
      params: Weights of the policy, including the adapter.
      config: Model configuration.
      base: Folder or Hugging Face Hub name of the base policy, for adapter_config.json.
      dtype: Type of the saved tensors.
      card: Text of README.md. If empty, the file is not written.
      names: Names of the base policy's tensors in its folder, see `language_tensor_names`. They differ from the names
        of the family if the folder contains a vision model. If None, the names of the family are used.

    Raises:
      ValueError: If an adapted weight is not among `names`.
      FileExistsError: If `path` already exists.
      OSError: If the folder cannot be written.
    """
    tensors = jax.device_get(peft_tensors(params, config, dtype, names or {}))
    contiguous = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    with new_folder(Path(path)) as folder:
        write_json(folder / "adapter_config.json", _adapter_config(config, base))
        save_tensors(contiguous, folder / "adapter_model.safetensors")
        write_digests(folder)
        if card:
            (folder / "README.md").write_text(card, encoding="utf-8")


def peft_tensors(params: Params, config: ModelConfig, dtype: str, names: Mapping[str, str]) -> dict[str, jax.Array]:
    """Converts the adapter to the names and layout of PEFT.

    Args:
      params: Weights of the policy.
      config: Model configuration.
      dtype: Type of the tensors.
      names: Names of the base policy's tensors, see `save_adapter`. If empty, the names of the family are used.

    Returns:
      The tensors lora_A [rank, in] and lora_B [out, rank] of each adapted weight of each layer, keyed by name.

    Raises:
      ValueError: If an adapted weight is not among `names`.
    """
    weights, tensors = ARCHITECTURES[config.family].weights, {}
    for layer, (stack, index) in enumerate(config.places):
        for name in (name for name in config.lora_targets if name in params[stack]):
            weight = weights[f"{stack}.{name}"].name.format(layer)
            if names and weight not in names:
                raise ValueError(f"The base policy has no tensor {weight}; restore the base policy of the run.")
            module = PREFIX + names.get(weight, weight).removesuffix(".weight")
            a, b = (jnp.asarray(params[stack][f"{name}_lora_{part}"][index], jnp.dtype(dtype)) for part in "ab")
            tensors[f"{module}.lora_A.weight"] = a.reshape(math.prod(a.shape[:-1]), -1).T
            tensors[f"{module}.lora_B.weight"] = b.reshape(len(b), -1).T
    return tensors


def _adapter_config(config: ModelConfig, base: str) -> dict[str, Any]:
    weights = ARCHITECTURES[config.family].weights
    adapted = [
        weights[path].name
        for name in config.lora_targets
        for stack in config.stacks
        if (path := f"{stack}.{name}") in weights
    ]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": config.lora_scale * config.lora_rank,
        "target_modules": list(dict.fromkeys(name.split(".")[-2] for name in adapted)),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
