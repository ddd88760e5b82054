"""Lists the arrays of a layer that compiled programs hold, and counts the values of those that a device holds.

The arrays that remat=none saves were read from the traced layer. The others were compared with programs for CPUs.
"""

from typing import NamedTuple

import numpy as np

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.linear_attention import CHUNK
from poly_epo_jax.parallel.devices import Machine

FLOAT32_BYTES = 4


class LayerArray(NamedTuple):
    """An array of a layer that holds one vector per token.

    Attributes:
      name: Description of the array.
      width: Length of the vectors: width of the residual "stream" or of the "mlp", all heads of "queries" or "keys", or
        the "channels", all heads of "values", or share of the "states" of linear attention.
      split: Whether the array is sharded over the mesh axis `tensor`.
      held: "layer" if a device holds the array during the backward pass of the layer's MLP, and the remat policies
        that save the array of every layer for the backward pass.
      part: Part of the layer on which the array depends. Arrays of "blockwise" belong to that attention kernel, and
        arrays of "cpu" to programs for CPUs. Arrays of "pre_norm" and "post_norm" exist in models that normalize the
        inputs and the outputs of attention and MLP, arrays of "qk_norm" if queries and keys are normalized, of
        "tpu_qk_norm" only on TPUs, and of "gated_attention" in models with this attention. Arrays of "gelu" belong to
        this activation. Arrays of "experts" exist in mixtures of experts, which have no arrays of the width "mlp".
        Other parts name the weight of a matrix product. If this weight has an adapter, remat=dots also saves the
        adapter's product.
      is_float32: Whether the array is float32 with every compute dtype.
    """

    name: str
    width: str
    split: bool
    held: tuple[str, ...]
    part: str = ""
    is_float32: bool = False


_LAYER, _NONE, _EACH = ("layer",), ("none",), ("layer", "none")
_DOTS = ("layer", "none", "dots")

LAYER_ARRAYS = (
    LayerArray("input", "stream", False, _LAYER),
    LayerArray("input of its norm", "stream", False, _NONE, "pre_norm"),
    LayerArray("input, split by tokens", "stream", True, ("full", "attention", "dots")),
    LayerArray("input, normalized", "stream", False, _LAYER, "pre_norm"),
    LayerArray("input of q, k and v", "stream", False, _NONE),
    LayerArray("product of q", "queries", True, ("dots",), "q"),
    LayerArray("product of q, before its norm", "queries", True, _NONE, "qk_norm"),
    LayerArray("queries, normalized", "queries", True, _LAYER),
    LayerArray("queries, rotated", "queries", True, _EACH),
    LayerArray("product of k", "keys", True, ("layer", "dots"), "k"),
    LayerArray("product of k, before its norm", "keys", True, _NONE, "qk_norm"),
    LayerArray("keys, normalized", "keys", True, _LAYER),
    LayerArray("keys, rotated", "keys", True, _EACH),
    LayerArray("product of v", "keys", True, _DOTS, "v"),
    LayerArray("attention", "queries", True, (*_DOTS, "attention")),
    LayerArray("input of o", "queries", True, _NONE),
    LayerArray("gate of the attention", "queries", True, _DOTS, "gated_attention"),
    LayerArray("sigmoid(gate)", "queries", True, _NONE, "gated_attention"),
    LayerArray("attention, gated", "queries", True, _EACH, "gated_attention"),
    # The number of arrays of each width of linear attention was fitted to the memory of compiled programs for CPUs.
    LayerArray("product of qkv", "channels", False, _DOTS, "qkv"),
    *(LayerArray(f"inputs of the convolution, distance {i}", "channels", False, ("layer",)) for i in range(4)),
    LayerArray("gradient of the convolution", "channels", False, ("layer",), is_float32=True),
    LayerArray("queries, keys and values", "channels", True, _EACH, is_float32=True),
    LayerArray("queries, keys and values, gradient", "channels", True, ("layer",), is_float32=True),
    LayerArray("chunks", "channels", True, ("layer",), is_float32=True),
    LayerArray("chunks, gradient", "channels", True, ("layer",), is_float32=True),
    LayerArray("states before chunks", "states", True, _EACH, is_float32=True),
    LayerArray("output of chunks", "values", True, _LAYER),
    LayerArray("output of linear attention", "values", True, _LAYER),
    LayerArray("output, in float32", "values", True, _NONE, is_float32=True),
    LayerArray("output, times its norm weight", "values", True, _NONE, is_float32=True),
    LayerArray("product of output_gate", "values", True, _DOTS, "output_gate"),
    LayerArray("output gate, in float32", "values", True, _NONE, is_float32=True),
    LayerArray("sigmoid(output gate)", "values", True, _NONE, is_float32=True),
    LayerArray("silu(output gate)", "values", True, _NONE, is_float32=True),
    LayerArray("output, gated", "values", True, _LAYER),
    LayerArray("output, gated and rounded", "values", True, _EACH),
    LayerArray("product of o", "stream", True, ("dots",), "o"),
    LayerArray("product of o, before its norm", "stream", False, _EACH, "post_norm"),
    LayerArray("input of the MLP", "stream", False, _LAYER),
    LayerArray("input of the norm of the MLP", "stream", False, _NONE, "pre_norm"),
    LayerArray("input of the MLP, normalized", "stream", False, _LAYER, "pre_norm"),
    LayerArray("input of gate and up", "stream", False, _NONE),
    LayerArray("product of gate", "mlp", True, _DOTS, "gate"),
    LayerArray("product of up", "mlp", True, _DOTS, "up"),
    LayerArray("powers of gate", "mlp", True, _NONE, "gelu"),
    LayerArray("tanh(powers of gate)", "mlp", True, _NONE, "gelu"),
    LayerArray("silu(gate)", "mlp", True, _EACH),
    LayerArray("silu(gate) up", "mlp", True, _EACH),
    LayerArray("product of down, before its norm", "stream", False, _DOTS, "post_norm"),
    LayerArray("gradient of silu(gate) up", "mlp", True, _EACH),
    LayerArray("gradient of silu(gate) or up", "mlp", True, _EACH),
    LayerArray("gradient of the output", "stream", False, _LAYER),
    # Experts process blocks of tokens. Sums over experts are float32, or two values in the compute dtype.
    LayerArray("sum over experts", "stream", False, ("layer",), "experts"),
    LayerArray("sum over experts, other half", "stream", False, ("layer",), "experts"),
    # Programs for TPUs also hold float32 inputs of the norms of queries and keys.
    LayerArray("product of q, recomputed in float32", "queries", True, _LAYER, "tpu_qk_norm", is_float32=True),
    LayerArray("product of k, recomputed in float32", "keys", True, _LAYER, "tpu_qk_norm", is_float32=True),
    # Programs for CPUs hold the inputs of norms with their results.
    LayerArray("input, before its norm", "stream", False, _LAYER, "cpu"),
    LayerArray("queries, before their norm", "queries", True, _LAYER, "cpu"),
    LayerArray("input of the MLP, before its norm", "stream", False, _LAYER, "cpu"),
    # Matmuls on CPUs need transposed arrays, and the blockwise attention holds blocks and initial sums.
    LayerArray("input, transposed", "stream", False, _EACH, "blockwise"),
    LayerArray("input of the MLP, transposed", "stream", False, _LAYER, "blockwise"),
    LayerArray("blocks of queries", "queries", True, _LAYER, "blockwise"),
    LayerArray("sums of the attention", "queries", True, _LAYER, "blockwise"),
    LayerArray("blocks of keys", "keys", True, _EACH, "blockwise"),
    LayerArray("blocks of values", "keys", True, _EACH, "blockwise"),
)


def layer_values(model_config: ModelConfig, machine: Machine, holder: str, stack: str = "layers") -> int:
    """Returns the number of values per token that one device holds for the arrays of one layer.

    Args:
      model_config: The model configuration.
      machine: The machine.
      holder: "layer" for the backward pass of the layer's MLP, or the remat policy that saves the arrays.
      stack: Stack of the layer, a key of `ModelConfig.stacks`.
    """
    widths = {"stream": model_config.hidden_size, "mlp": model_config.mlp_size}
    if stack == "linear_layers":
        all_values = model_config.linear_value_heads * model_config.linear_value_dim
        widths["channels"], widths["values"] = model_config.linear_channels, all_values
        widths["states"] = all_values * model_config.linear_key_dim // CHUNK
    else:
        widths["queries"] = model_config.num_heads * model_config.head_dim
        widths["keys"] = model_config.num_kv_heads * model_config.head_dim
    # On TPUs, models with windows use blockwise attention.
    has_kernel = machine.platform == "gpu" or (machine.platform == "tpu" and not any(model_config.windows))
    is_blockwise = model_config.attention == "blockwise" or (model_config.attention == "auto" and not has_kernel)
    parts = {
        "blockwise": is_blockwise,
        "cpu": machine.platform == "cpu",
        "pre_norm": model_config.pre_norm,
        "qk_norm": model_config.qk_norm,
        "tpu_qk_norm": model_config.qk_norm and machine.platform == "tpu",
        "post_norm": model_config.post_norm,
        "gelu": model_config.activation != "silu",
        "mlp": not model_config.num_experts,
        "experts": model_config.num_experts > 0,
        "gated_attention": model_config.gated_attention,
    }
    absent = {part for part, is_present in parts.items() if not is_present}
    present = [array for array in LAYER_ARRAYS if array.width in widths]
    held = [array for array in present if holder in array.held and absent.isdisjoint((array.part, array.width))]
    if holder == "dots":
        held += [array for array in held if array.part in model_config.lora_targets]
    float32_values = FLOAT32_BYTES // activation_bytes(model_config, machine)

    def values_of(is_split: bool) -> int:
        arrays = (array for array in held if array.split == is_split)
        sizes = ((widths[array.width], array.is_float32) for array in arrays)
        return sum(width * (float32_values if is_float32 else 1) for width, is_float32 in sizes)

    return values_of(True) // machine.mesh["tensor"] + values_of(False)


def activation_bytes(model_config: ModelConfig, machine: Machine) -> int:
    """Returns the bytes of one activation. Programs for CPUs hold bfloat16 activations in float32."""
    return FLOAT32_BYTES if machine.device == "cpu" else bytes_of(model_config.dtype)


def bytes_of(dtype: str) -> int:
    """Returns the bytes of one element of a dtype."""
    return np.dtype(dtype).itemsize
