"""Model FLOPs and bytes: what a computation must do at least, from shapes alone. A multiply-add counts as two."""

import math

import numpy as np
from jaxtyping import Int

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.lora import is_adapter, without_adapter
from poly_epo_jax.model.qwen3 import declared_weights


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
