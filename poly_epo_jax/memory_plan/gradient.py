"""Plans the memory of the gradient: the forward and backward pass of one microbatch.

Every array that compiled programs were seen to hold has a row: the arrays of a layer in `LAYER_ARRAYS`, the others in
the function of their part of the pass. `tests/memory_plan/test_plan.py` compares the sums with compiled programs.
"""

from typing import NamedTuple

import numpy as np

from poly_epo_jax.config.keys import Config
from poly_epo_jax.model import flops
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.logprobs import chunk_size
from poly_epo_jax.parallel.devices import Setting
from poly_epo_jax.step.packing import row_tokens

FLOAT32 = 4  # bytes


class LayerArray(NamedTuple):
    """An array of a layer that holds one vector per token.

    Attributes:
      name: Description of the array.
      width: Length of the vectors: that of the residual "stream", the "mlp", or all heads of "queries" or of "keys".
      split: Whether the array is split over the mesh axis `tensor`.
      held: "layer" if a device holds the array during the backward pass of the layer's MLP, and the remat policies
        under which all layers keep it for the backward pass.
      part: Part of the layer that determines whether the array exists. Arrays of "blockwise" belong to that attention
        implementation. Arrays of "norm" and "qk_norm" are inputs of norm weights, and remat=none does not keep them if
        these weights are frozen. Other parts are products: with remat=dots, the product of an adapter is kept as well.
    """

    name: str
    width: str
    split: bool
    held: tuple[str, ...]
    part: str = ""


_EACH, _DOTS = ("layer", "none"), ("layer", "none", "dots")

LAYER_ARRAYS = (
    LayerArray("input", "stream", False, _EACH),
    LayerArray("input, split by tokens", "stream", True, ("full", "attention", "dots")),
    LayerArray("input, normalized", "stream", False, _EACH, "norm"),
    LayerArray("product of q", "queries", True, ("dots",), "q"),
    LayerArray("queries, normalized", "queries", True, _EACH, "qk_norm"),
    LayerArray("queries, rotated", "queries", True, _EACH),
    LayerArray("product of k", "keys", True, _DOTS, "k"),
    LayerArray("keys, normalized", "keys", True, _EACH, "qk_norm"),
    LayerArray("keys, rotated", "keys", True, _EACH),
    LayerArray("product of v", "keys", True, _DOTS, "v"),
    LayerArray("attention", "queries", True, (*_DOTS, "attention")),
    LayerArray("product of o", "stream", True, ("dots",), "o"),
    LayerArray("input of the MLP", "stream", False, _EACH),
    LayerArray("input of the MLP, normalized", "stream", False, _EACH, "norm"),
    LayerArray("product of gate", "mlp", True, _DOTS, "gate"),
    LayerArray("product of up", "mlp", True, _DOTS, "up"),
    LayerArray("silu(gate)", "mlp", True, _EACH),
    LayerArray("silu(gate) up", "mlp", True, _EACH),
    LayerArray("gradient of silu(gate) up", "mlp", True, _EACH),
    LayerArray("gradient of silu(gate) or up", "mlp", True, _EACH),
    LayerArray("gradient of the output", "stream", False, _EACH),
    # Matmuls on CPUs need transposed arrays, and the blockwise attention holds blocks and initial sums.
    LayerArray("input, transposed", "stream", False, _EACH, "blockwise"),
    LayerArray("input of the MLP, transposed", "stream", False, _EACH, "blockwise"),
    LayerArray("blocks of queries", "queries", True, _EACH, "blockwise"),
    LayerArray("sums of the attention", "queries", True, _EACH, "blockwise"),
    LayerArray("blocks of keys", "keys", True, _EACH, "blockwise"),
    LayerArray("blocks of values", "keys", True, _EACH, "blockwise"),
)


class _Array(NamedTuple):
    """An array, the term of the plan that counts it, and whether a device holds it in this configuration."""

    term: str
    elements: int
    element_bytes: int
    is_held: bool = True


def gradient_bytes(config: Config, shape: ModelConfig, setting: Setting, rows: int) -> dict[str, int]:
    """Plans one microbatch's forward and backward pass on one device.

    The backward pass goes through the head first, then through the layers. The larger of these two parts counts, except
    on TPUs: their programs allocate both parts separately, and convert the weights of all layers to the compute type
    before the loop over layers.

    Args:
      rows: Number of rows of the microbatch on each group of `tensor` devices.

    Returns:
      Bytes of each term.
    """
    tokens, value_bytes = rows * row_tokens(config), bytes_of(shape.dtype)
    trained = flops.trained_elements(config, shape, setting.mesh)
    kept = shape.num_layers * layer_values(shape, setting, shape.remat) * tokens
    attention = shape.num_layers * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads) * 2
    always = _terms(
        _Array("sum of gradients", trained, FLOAT32),
        _Array("kept for the backward pass", kept, _activation_bytes(shape, setting)),
        # The attention's weights in the compute type.
        _Array("kept for the backward pass", attention // setting.mesh["tensor"], value_bytes, shape.remat == "none"),
    )
    head, layer = _head(shape, setting, tokens), _layer(shape, setting, tokens)
    if setting.platform == "tpu":
        weights, is_converted = flops.layer_weights(shape) // setting.weight_shards, shape.dtype != shape.param_dtype
        converted = _terms(_Array("layers' weights, converted", weights, value_bytes, is_converted))
        return always | converted | head | layer
    return always | max(layer, head, key=lambda terms: sum(terms.values()))


def layer_values(shape: ModelConfig, setting: Setting, holder: str) -> int:
    """Returns the number of values per token that one device holds of a layer's arrays.

    Args:
      holder: "layer" for the backward pass of the layer's MLP, or the remat policy that keeps the arrays.
    """
    widths = {
        "stream": shape.hidden_size,
        "mlp": shape.mlp_size,
        "queries": shape.num_heads * shape.head_dim,
        "keys": shape.num_kv_heads * shape.head_dim,
    }
    is_blockwise = shape.attention == "blockwise" or (shape.attention == "auto" and setting.device == "cpu")
    absent = set() if is_blockwise else {"blockwise"}
    if holder == "none" and shape.lora_targets:
        absent |= {"norm", "qk_norm"} if shape.qk_norm else {"norm"}
    held = [one for one in LAYER_ARRAYS if holder in one.held and one.part not in absent]
    if holder == "dots":
        held += [one for one in held if one.part in shape.lora_targets]
    split = sum(widths[one.width] for one in held if one.split)
    whole = sum(widths[one.width] for one in held if not one.split)
    return split // setting.mesh["tensor"] + whole


def _head(shape: ModelConfig, setting: Setting, tokens: int) -> dict[str, int]:
    """The head's backward pass in chunks of tokens, for which every device holds the whole head."""
    value_bytes, is_cpu, is_tpu = bytes_of(shape.dtype), setting.platform == "cpu", setting.platform == "tpu"
    is_parameter = setting.weight_shards == 1 and shape.dtype == shape.param_dtype
    is_trained = not shape.lora_targets  # a frozen head needs no gradient
    head, chunk = shape.vocab_size * shape.hidden_size, min(chunk_size(setting.device, shape.vocab_size), tokens)
    sums, logits = "sums of the head's gradient", "logits of a chunk"
    return _terms(
        _Array("the whole head", head, value_bytes, not is_parameter),
        _Array(sums, head, FLOAT32, is_trained),  # of all chunks
        _Array(sums, head, FLOAT32, is_trained),  # of one chunk, before it is added
        _Array(sums, head, FLOAT32, is_trained and is_tpu and setting.mesh["fsdp"] > 4),  # sum over chips
        _Array(logits, chunk * shape.vocab_size, FLOAT32),
        _Array(logits, chunk * shape.vocab_size, FLOAT32 if is_cpu else value_bytes),  # their gradient
        _Array(logits, chunk * shape.vocab_size, FLOAT32, is_cpu),  # one of both again
        _Array(logits, -min(chunk, shape.hidden_size) * shape.vocab_size, FLOAT32, is_tpu),  # share the chunk's sum
        _Array("hidden states", 3 * tokens // setting.mesh["tensor"] * shape.hidden_size, value_bytes),
    )


def _layer(shape: ModelConfig, setting: Setting, tokens: int) -> dict[str, int]:
    """A layer's backward pass at its MLP: all arrays of the layer, its weights and the gradients of the MLP's."""
    value_bytes, is_trained = bytes_of(shape.dtype), not shape.lora_targets
    is_copied = setting.mesh["fsdp"] > 1 or shape.dtype != shape.param_dtype
    weights = flops.layer_weights(shape) // shape.num_layers + is_trained * 3 * shape.hidden_size * shape.mlp_size
    activations, head = layer_values(shape, setting, "layer") * tokens, shape.vocab_size * shape.hidden_size
    return _terms(
        _Array("a layer's activations", activations, _activation_bytes(shape, setting)),
        _Array("a layer's weights and gradients", weights // setting.mesh["tensor"], value_bytes, is_copied),
        _Array("the head's gradient", head // setting.weight_shards, value_bytes, is_trained),
    )


def _terms(*arrays: _Array) -> dict[str, int]:
    """Sums the bytes of the arrays by term."""
    terms = dict.fromkeys((array.term for array in arrays), 0)
    for array in arrays:
        terms[array.term] += array.elements * array.element_bytes * array.is_held
    return terms


def _activation_bytes(shape: ModelConfig, setting: Setting) -> int:
    """Returns the bytes of one value. CPUs multiply in float32 only, and hold bfloat16 values in float32."""
    return FLOAT32 if setting.device == "cpu" else bytes_of(shape.dtype)


def bytes_of(dtype: str) -> int:
    """Returns the bytes of one element."""
    return np.dtype(dtype).itemsize
