"""Model FLOPs and bytes: what a computation must do at least, from shapes alone. A multiply-add counts as two."""

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int

from poly_epo_jax.config.keys import Config
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.lora import is_adapter, without_adapter
from poly_epo_jax.model.partition import is_trainable
from poly_epo_jax.model.qwen3 import declared_weights
from poly_epo_jax.parallel.mesh import RULES


def layer_weights(config: ModelConfig) -> int:
    """Elements of all layers' matrices; norms and biases are left out, as they cost next to nothing."""
    return sum(size for path, size in matrix_sizes(config).items() if path.startswith("layers."))


def total_weights(config: ModelConfig) -> int:
    """Elements of the layers' matrices and of the embedding; the head's too, where it is not tied."""
    return sum(matrix_sizes(config).values())


def matrix_sizes(config: ModelConfig) -> dict[str, int]:
    """Elements of each matrix that reads or writes the residual stream, by its path; layers' matrices are stacked.

    Adapters are left out.
    """
    declared = declared_weights(without_adapter(config)).items()
    return {path: math.prod(param.shape) for path, param in declared if "hidden_size" in param.axes}


def adapter_sizes(config: ModelConfig) -> dict[str, int]:
    """Elements of each part of the adapter, of all layers, by its path."""
    declared = declared_weights(config).items()
    return {path: math.prod(param.shape) for path, param in declared if is_adapter(path)}


def forward_flops(
    config: ModelConfig, prompt_lengths: Int[np.ndarray, " S"], response_lengths: Int[np.ndarray, " S"]
) -> float:
    """FLOPs of a forward pass over S sequences, with the head on response tokens only; a backward pass costs twice as
    much.

    Attention counts each query's earlier tokens of its own sequence: two matmuls over the head dimension.
    """
    lengths = (prompt_lengths + response_lengths).astype(float)
    matrices = 2 * (layer_weights(config) + sum(adapter_sizes(config).values())) * lengths.sum()
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * (lengths * (lengths + 1) / 2).sum()
    return float(matrices + attention + 2 * config.vocab_size * config.hidden_size * response_lengths.sum())


def cache_bytes_per_token(config: ModelConfig, value_bytes: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * value_bytes


def trained_sizes(config: Config, shape: ModelConfig) -> list[int]:
    """Elements of each matrix that is trained."""
    if shape.lora_targets:
        return list(adapter_sizes(shape).values())
    return [size for path, size in matrix_sizes(shape).items() if is_trainable(path, config.train.trainable)]


def trained_elements(config: Config, shape: ModelConfig, mesh: Mapping[str, int]) -> int:
    """Trained elements on each device of a mesh. It splits every matrix, but an adapter's matrices on one side only."""
    if not shape.lora_targets:
        return sum(trained_sizes(config, shape)) // (mesh["fsdp"] * mesh["tensor"])
    declared = declared_weights(shape)
    return sum(
        size // math.prod(mesh[split] for axis in declared[path].axes if (split := RULES[axis]))
        for path, size in adapter_sizes(shape).items()
    )


def gradient_passes(config: Config, shape: ModelConfig) -> float:
    """The FLOPs of a gradient divided by those of the forward pass: 3 if all weights are trained.

    The backward pass does as many multiplications as the forward pass for the gradients of activations, and as many
    again for the gradients of weights, counting only the weights that are trained.
    """
    all_sizes = [*matrix_sizes(shape).values(), *adapter_sizes(shape).values()]
    return 2 + sum(trained_sizes(config, shape)) / sum(all_sizes)
