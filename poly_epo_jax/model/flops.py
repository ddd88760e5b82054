"""Model FLOPs and bytes: the minimum work of a computation, derived from shapes. A multiply-add counts as two FLOPs."""

import collections
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from poly_epo_jax.config.keys import Config
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.lora import is_adapter, without_adapter
from poly_epo_jax.model.partition import is_trainable
from poly_epo_jax.model.transformer import declared_weights
from poly_epo_jax.parallel.mesh import RULES


def active_weights(config: ModelConfig) -> int:
    """Returns the number of elements of the matrices of all layers that one token is multiplied by.

    Of the experts of a layer, only those that the router selects for the token count.
    """
    return sum(size for path, size in active_sizes(config).items() if is_of_layers(path))


def is_of_layers(path: str) -> bool:
    """Returns True if the path of a weight is that of a stack of layers."""
    return "layers." in path


def total_weights(config: ModelConfig) -> int:
    """Returns the number of elements of the matrices of all layers, of the embedding and, unless tied, of the head."""
    return sum(matrix_sizes(config).values())


def matrix_sizes(config: ModelConfig) -> dict[str, int]:
    """Returns the number of elements of each matrix that reads or writes the residual stream, keyed by its path.

    The matrices of all layers count together. Adapters are not counted. Norms and biases are negligible.
    """
    declared = declared_weights(without_adapter(config)).items()
    return {path: math.prod(param.shape) for path, param in declared if "hidden_size" in param.axes}


def active_sizes(config: ModelConfig) -> dict[str, int]:
    """Returns `matrix_sizes` without the experts that the router does not select for a token."""
    declared, sizes = declared_weights(without_adapter(config)), matrix_sizes(config)
    experts = {path for path in sizes if declared[path].axes[1:2] == ("num_experts",)}
    return {
        path: size * config.experts_per_token // config.num_experts if path in experts else size
        for path, size in sizes.items()
    }


def weights_per_device(
    config: ModelConfig, mesh: Mapping[str, int], gathered: Sequence[str] = (), of_layers: bool = False
) -> int:
    """Returns the number of elements of the model's matrices on each device of a mesh.

    Args:
      config: Model configuration.
      mesh: Size of each mesh axis.
      gathered: Mesh axes over which the matrices are not sharded.
      of_layers: Whether only the matrices of layers are counted.
    """
    sizes = {path: size for path, size in matrix_sizes(config).items() if is_of_layers(path) or not of_layers}
    return elements_per_device(config, sizes, {**mesh, **dict.fromkeys(gathered, 1)})


def elements_per_device(config: ModelConfig, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> int:
    """Returns the number of elements on each device of a mesh of weights with these sizes, keyed by their paths."""
    declared = declared_weights(config)
    shards = {path: math.prod(mesh[axis] for name in declared[path].axes if (axis := RULES[name])) for path in sizes}
    return sum(size // shards[path] for path, size in sizes.items())


def adapter_sizes(config: ModelConfig) -> dict[str, int]:
    """Returns the number of elements of each adapter matrix, of all layers together, keyed by its path."""
    declared = declared_weights(config).items()
    return {path: math.prod(param.shape) for path, param in declared if is_adapter(path)}


def forward_flops(
    config: ModelConfig, prompt_lengths: Int[np.ndarray, " S"], response_lengths: Int[np.ndarray, " S"]
) -> float:
    """Returns the FLOPs of a forward pass over S sequences. A backward pass of all weights takes twice as many.

    The head is counted for response tokens only. Attention counts two matmuls over the head dimension for each pair of
    a query and a key at the same or an earlier position of its sequence, within the window of the layer. Linear
    attention counts three products of the state of each value head and a vector for each token.

    Args:
      config: Model configuration.
      prompt_lengths: Number of prompt tokens of each sequence.
      response_lengths: Number of response tokens of each sequence.

    Returns:
      The number of FLOPs.
    """
    lengths = (prompt_lengths + response_lengths).astype(float)

    def pairs(window: int) -> float:
        beyond = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
        return float((lengths * (lengths + 1) / 2 - beyond * (beyond + 1) / 2).sum())

    matrices = 2 * (active_weights(config) + sum(adapter_sizes(config).values())) * lengths.sum()
    attention = 4 * config.num_heads * config.head_dim * sum(map(pairs, config.attention_windows))
    attention += 6 * linear_state_values(config) * lengths.sum()
    return float(matrices + attention + 2 * config.vocab_size * config.hidden_size * response_lengths.sum())


def linear_state_values(config: ModelConfig) -> int:
    """Returns the number of elements of the states of all layers with linear attention of one sequence."""
    heads = config.linear_value_heads * config.linear_key_dim * config.linear_value_dim
    return heads * len(config.stacks.get("linear_layers", ()))


def cache_bytes(config: ModelConfig, lengths: int | Int[np.ndarray, " S"], value_bytes: int) -> int:
    """Returns the bytes of the cached keys, values and states of one or several sequences in all layers.

    Args:
      config: Model configuration.
      lengths: Number of tokens of each sequence. Layers with a window cache at most as many tokens as their window.
      value_bytes: Bytes per cached value.

    Returns:
      The number of bytes.
    """
    layers = collections.Counter(config.attention_windows).items()
    tokens = sum(count * int(np.minimum(lengths, window or lengths).sum()) for window, count in layers)
    state_bytes = 4 * linear_state_values(config)
    return 2 * tokens * config.num_kv_heads * config.head_dim * value_bytes + np.size(lengths) * state_bytes


def trained_sizes(config: Config, model_config: ModelConfig) -> dict[str, int]:
    """Returns the number of elements of each trained matrix, keyed by its path.

    Args:
      config: Configuration of the run.
      model_config: Model configuration. If it has an adapter, only the adapter matrices are trained.

    Returns:
      The sizes, with the matrices of all layers counted together.
    """
    if model_config.lora_targets:
        return adapter_sizes(model_config)
    sizes, pattern = matrix_sizes(model_config), config.train.trainable_pattern
    return {path: size for path, size in sizes.items() if is_trainable(path, pattern)}


def trained_elements(config: Config, model_config: ModelConfig, mesh: Mapping[str, int]) -> int:
    """Returns the number of trained elements on each device of a mesh.

    Args:
      config: Configuration of the run.
      model_config: Model configuration.
      mesh: Size of each mesh axis.

    Returns:
      The number of elements per device.
    """
    return elements_per_device(model_config, trained_sizes(config, model_config), mesh)


def gradient_passes(config: Config, model_config: ModelConfig) -> float:
    """Returns the ratio between the FLOPs of a forward and backward pass and the FLOPs of a forward pass.

    The ratio is 3 if all weights are trained: the backward pass takes as many FLOPs as the forward pass for the
    gradients of activations, and as many again for the gradients of weights. The second term counts only trained
    weights.

    Args:
      config: Configuration of the run.
      model_config: Model configuration.

    Returns:
      The ratio, from 2 to 3.
    """
    sizes = active_sizes(model_config) | adapter_sizes(model_config)
    return 2 + sum(sizes[path] for path in trained_sizes(config, model_config)) / sum(sizes.values())
