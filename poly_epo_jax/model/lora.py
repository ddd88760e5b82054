"""LoRA (Hu et al., 2021): low-rank adapters, which are trained while the other weights are frozen.

An adapter replaces a weight W [*in, *out] by W + (alpha / rank) A B, with A [*in, rank] and B [rank, *out]. Training
computes x W + (alpha / rank) (x A) B, so that no gradient of the size of W is needed (layer_stack.py). Generation and
export use the sum, which `merge_adapter` computes. A and B are stored next to W in the parameter tree, as in
`q_lora_a` and `q_lora_b`.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from poly_epo_jax.config.keys import Config, ConfigError, LoraSection
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.partition import split_params
from poly_epo_jax.model.transformer import init_params
from poly_epo_jax.types import Params

ADAPTER = r"\w*layers\.\w+_lora_[ab]"
"""Regular expression that matches the paths of adapter weights."""


def check_adapter(config: ModelConfig) -> None:
    """Verifies that the model supports its adapter.

    Raises:
      ConfigError: If experts would have an adapter.
    """
    if config.num_experts and (found := [name for name in ("gate", "up", "down") if name in config.lora_targets]):
        raise ConfigError(
            f"lora.targets contains {found[0]}_proj, but adapters of experts are not supported; set lora.targets to "
            "projections of the attention: q_proj, k_proj, v_proj and o_proj."
        )


def lora_fields(section: LoraSection) -> dict[str, Any]:
    """Returns the ModelConfig fields that the `lora` section sets. Returns {} if its rank is 0."""
    if not section.rank:
        return {}
    targets = tuple(target.removesuffix("_proj") for target in section.targets)
    return {"lora_rank": section.rank, "lora_scale": section.alpha / section.rank, "lora_targets": targets}


def trained_pattern(config: Config) -> str:
    """Returns the regular expression of the trained weights of a run, see `split_params`."""
    return ADAPTER if config.lora.rank else config.train.trainable_pattern


def is_adapter(name: str) -> bool:
    """Returns True if a path or name of a weight belongs to an adapter."""
    return re.search(r"_lora_[ab]$", name) is not None


def without_adapter(config: ModelConfig) -> ModelConfig:
    """Returns the configuration of the same model without an adapter."""
    return dataclasses.replace(config, lora_rank=0, lora_scale=0.0, lora_targets=())


def split_adapter(config: ModelConfig, params: Params) -> tuple[Params, Params]:
    """Splits the parameter tree into the adapter and the other weights.

    Args:
      config: Model configuration.
      params: Parameter tree. Leaves may have any type, such as shardings.

    Returns:
      A tuple of the adapter ({} if the model has none) and the weights of the base policy.
    """
    return split_params(params, ADAPTER) if config.lora_targets else ({}, params)


def init_adapter(config: ModelConfig, seed: int, shardings: Params) -> Params:
    """Creates the initial adapter of a model. Its values do not depend on the mesh.

    Args:
      config: Model configuration.
      seed: Random seed.
      shardings: Sharding of each weight of the model, including the adapter.

    Returns:
      The adapter, or {} if the model has none.
    """
    if not config.lora_targets:
        return {}
    # The compiler removes the weights that are not returned.
    draw = jax.jit(
        lambda: split_adapter(config, init_params(config, seed))[0], out_shardings=split_adapter(config, shardings)[0]
    )
    return draw()


def merge_adapter(config: ModelConfig, layers: Mapping[str, Any], name: str, index: Any) -> Any:
    """Returns a weight of one layer or expert with its adapter merged.

    Args:
      config: Model configuration.
      layers: Stacked weights of all layers, including adapters.
      name: Name of the weight, such as "q".
      index: Index of the layer, or of the layer and the expert.

    Returns:
      W + (alpha / rank) A B of shape [*in, *out], computed in float32. A weight without an adapter is returned as
      stored.
    """
    weight = layers[name][index]
    if name not in config.lora_targets:
        return weight
    a, b = (jnp.asarray(layers[f"{name}_lora_{part}"][index], jnp.float32) for part in "ab")
    product = jnp.tensordot(a, b, axes=1, precision=jax.lax.Precision.HIGHEST)
    return jnp.asarray(weight, jnp.float32) + config.lora_scale * product
