"""LoRA (Hu et al., 2021): low-rank adapters, trained alongside frozen weights.

A weight W [*in, *out] with an adapter stands for W + (alpha / rank) A B, with A [*in, rank] and B [rank, *out].
Training computes x W + (alpha / rank) (x A) B, so that nothing of W's size has a gradient (qwen3.py); generating and
exporting read the sum, `merged`. The parts of an adapter lie next to their weight in the tree: q_lora_a and q_lora_b.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from poly_epo_jax.config.keys import Config, LoraSection
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.partition import split_params
from poly_epo_jax.model.qwen3 import first_params
from poly_epo_jax.types import Params

ADAPTER = r"layers\.\w+_lora_[ab]"
"""The pattern of an adapter's paths."""


def lora_fields(section: LoraSection) -> dict[str, Any]:
    """The fields of ModelConfig that the `lora` section sets."""
    if not section.rank:
        return {}
    targets = tuple(target.removesuffix("_proj") for target in section.targets)
    return {"lora_rank": section.rank, "lora_scale": section.alpha / section.rank, "lora_targets": targets}


def trained_pattern(config: Config) -> str:
    """The pattern of the weights that a run trains, see `split_params`."""
    return ADAPTER if config.lora.rank else config.train.trainable


def is_adapter(name: str) -> bool:
    """Whether a weight, by the last word of its path, is part of an adapter."""
    return re.search(r"_lora_[ab]$", name) is not None


def without_adapter(config: ModelConfig) -> ModelConfig:
    """The base policy's shape, without the adapter."""
    return dataclasses.replace(config, lora_rank=0, lora_scale=0.0, lora_targets=())


def split_adapter(config: ModelConfig, params: Params) -> tuple[Params, Params]:
    """(adapter, base policy); the adapter is empty if the model has none."""
    return split_params(params, ADAPTER) if config.lora_targets else ({}, params)


def first_adapter(config: ModelConfig, seed: int, shardings: Params) -> Params:
    """The adapter before training, the same on any mesh; {} if the model has none.

    Args:
      shardings: of all weights.
    """
    if not config.lora_targets:
        return {}

    def draw() -> Params:  # the compiler leaves out what is not returned
        return split_adapter(config, first_params(config, seed))[0]

    return jax.jit(draw, out_shardings=split_adapter(config, shardings)[0])()


def merged(config: ModelConfig, layers: Mapping[str, Any], name: str, layer: int) -> Any:
    """A layer's weight [*in, *out]; if it has an adapter, W + (alpha / rank) A B, with both terms in float32.

    Args:
      layers: all layers' weights, including those of adapters.
    """
    weight = layers[name][layer]
    if name not in config.lora_targets:
        return weight
    a, b = (jnp.asarray(layers[f"{name}_lora_{part}"][layer], jnp.float32) for part in "ab")
    product = jnp.tensordot(a, b, axes=1, precision=jax.lax.Precision.HIGHEST)
    return jnp.asarray(weight, jnp.float32) + config.lora_scale * product
