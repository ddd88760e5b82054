"""Plans the memory of the gradient: the forward and backward pass of one microbatch.

Each array that compiled programs were observed to hold has one entry, except for linear attention. `LAYER_ARRAYS` lists
the arrays of a layer, and `gradient_bytes`, `_head` and `_layer` list the others. `tests/memory_plan/test_plan.py`
compares the sums with compiled programs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from poly_epo_jax.config.keys import Config
from poly_epo_jax.model import flops
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.linear_attention import CHUNK
from poly_epo_jax.model.logprobs import chunk_size
from poly_epo_jax.model.transformer import declared_weights
from poly_epo_jax.parallel.devices import Machine
from poly_epo_jax.step.packing import row_tokens

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
      part: Part of the layer on which the array depends. Arrays of "blockwise" belong to that attention kernel. Arrays
        of "norm" and "qk_norm" are normalized values, which remat=none does not save if an adapter is trained, because
        the norm weights are then frozen. Arrays of "experts" exist in mixtures of experts, which have no arrays of the
        width "mlp". Arrays of "norm" and "post_norm" exist in models that normalize the inputs and the outputs of
        attention and MLP, and arrays of "gated_attention" in models with this attention. Other parts name the weight of
        a matrix product. If this weight has an adapter, remat=dots also saves the adapter's product.
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
    LayerArray("input, in float32", "stream", False, _NONE, "pre_norm", is_float32=True),
    LayerArray("input, split by tokens", "stream", True, ("full", "attention", "dots")),
    LayerArray("input, normalized", "stream", False, _EACH, "norm"),
    LayerArray("input of q, k and v", "stream", False, _NONE),
    LayerArray("product of q", "queries", True, ("dots",), "q"),
    LayerArray("product of q, in float32", "queries", True, _NONE, "qk_norm", is_float32=True),
    LayerArray("queries, normalized", "queries", True, _EACH, "trained_qk_norm"),
    LayerArray("queries, rotated", "queries", True, _EACH),
    LayerArray("product of k", "keys", True, ("layer", "dots"), "k"),
    LayerArray("product of k, in float32", "keys", True, _NONE, "qk_norm", is_float32=True),
    LayerArray("keys, normalized", "keys", True, _EACH, "trained_qk_norm"),
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
    LayerArray("output, normalized", "values", True, _NONE, is_float32=True),
    LayerArray("output, times its norm weight", "values", True, _NONE, is_float32=True),
    LayerArray("product of output_gate", "values", True, _DOTS, "output_gate"),
    LayerArray("output gate, in float32", "values", True, _NONE, is_float32=True),
    LayerArray("sigmoid(output gate)", "values", True, _NONE, is_float32=True),
    LayerArray("silu(output gate)", "values", True, _NONE, is_float32=True),
    LayerArray("output, gated", "values", True, _LAYER),
    LayerArray("output, gated and rounded", "values", True, _EACH),
    LayerArray("product of o", "stream", True, ("dots",), "o"),
    LayerArray("product of o, before its norm", "stream", False, _LAYER, "post_norm"),
    LayerArray("product of o, in float32", "stream", False, _NONE, "post_norm", is_float32=True),
    LayerArray("product of o, normalized", "stream", False, _NONE, "trained_post_norm"),
    LayerArray("input of the MLP", "stream", False, _LAYER),
    LayerArray("input of the MLP, in float32", "stream", False, _NONE, "pre_norm", is_float32=True),
    LayerArray("input of the MLP, normalized", "stream", False, _EACH, "norm"),
    LayerArray("input of gate and up", "stream", False, _NONE),
    LayerArray("product of gate", "mlp", True, _DOTS, "gate"),
    LayerArray("product of up", "mlp", True, _DOTS, "up"),
    LayerArray("powers of gate", "mlp", True, _NONE, "gelu"),
    LayerArray("tanh(powers of gate)", "mlp", True, _NONE, "gelu"),
    LayerArray("silu(gate)", "mlp", True, _EACH),
    LayerArray("silu(gate) up", "mlp", True, _EACH),
    LayerArray("product of down, before its norm", "stream", False, ("layer", "dots"), "post_norm"),
    LayerArray("product of down, in float32", "stream", False, _NONE, "post_norm", is_float32=True),
    LayerArray("product of down, normalized", "stream", False, _NONE, "trained_post_norm"),
    LayerArray("gradient of silu(gate) up", "mlp", True, _EACH),
    LayerArray("gradient of silu(gate) or up", "mlp", True, _EACH),
    LayerArray("gradient of the output", "stream", False, _LAYER),
    # Experts process blocks of tokens. Sums over experts are float32, or two values in the compute dtype.
    LayerArray("sum over experts", "stream", False, ("layer",), "experts"),
    LayerArray("sum over experts, other half", "stream", False, ("layer",), "experts"),
    # Matmuls on CPUs need transposed arrays, and the blockwise attention holds blocks and initial sums.
    LayerArray("input, transposed", "stream", False, _EACH, "blockwise"),
    LayerArray("input of the MLP, transposed", "stream", False, _LAYER, "blockwise"),
    LayerArray("blocks of queries", "queries", True, _LAYER, "blockwise"),
    LayerArray("sums of the attention", "queries", True, _LAYER, "blockwise"),
    LayerArray("blocks of keys", "keys", True, _EACH, "blockwise"),
    LayerArray("blocks of values", "keys", True, _EACH, "blockwise"),
)

NORMALIZED = ("norm", "trained_qk_norm", "trained_post_norm")
"""Parts whose arrays are saved in float32 if norms multiply in float32."""


class _Array(NamedTuple):
    """An array, the term of the plan that includes it, and whether a device holds it in this configuration."""

    term: str
    elements: int
    element_bytes: int
    is_held: bool = True


def gradient_bytes(config: Config, model_config: ModelConfig, machine: Machine, rows: int) -> dict[str, int]:
    """Plans the forward and backward pass of one microbatch on one device.

    The backward pass processes the head first and then the layers, so only the larger of these two parts counts. On
    TPUs both parts count, because compiled programs allocate them separately. Programs for TPUs also convert the
    weights of all layers to the compute dtype before the loop over layers.

    Args:
      config: The configuration.
      model_config: The model configuration, with a resolved `remat`.
      machine: The machine.
      rows: Number of rows of the microbatch on each group of `tensor` devices.

    Returns:
      Bytes by term.
    """
    tokens, value_bytes = rows * row_tokens(config), bytes_of(model_config.dtype)
    trained = flops.trained_elements(config, model_config, machine.mesh)
    num_periods, runs = model_config.periods
    values = (size * layer_values(model_config, machine, model_config.remat, stack) for stack, size in runs)
    # The inner scans of a period save arrays that the outer scan copies.
    kept = tokens * sum(values) * (num_periods + (num_periods > 1))
    attention_widths = model_config.head_dim * (model_config.num_heads + model_config.num_kv_heads)
    attention = 2 * len(model_config.stacks.get("layers", ())) * model_config.hidden_size * attention_widths
    # Except on TPUs, sums over devices that have the same weights run after the loop over layers.
    is_summed = machine.platform != "tpu" and machine.mesh["data"] * machine.mesh["expert"] > 1
    summed = _layer_weights(model_config, machine, lambda axes: "num_experts" not in axes)
    # GPUs gather along the first axis of an array. Other weights are transposed before the loop.
    is_transposed = machine.platform == "gpu" and machine.mesh["fsdp"] > 1
    transposed = _layer_weights(model_config, machine, lambda axes: axes[1] != "hidden_size")
    always = _terms(
        _Array("sum of gradients", trained, FLOAT32_BYTES),
        _Array("gradients before their sum", summed, FLOAT32_BYTES, is_summed and not model_config.lora_targets),
        _Array("transposed weights", transposed, bytes_of(model_config.param_dtype), is_transposed),
        _Array("saved for the backward pass", kept, _activation_bytes(model_config, machine)),
        # The attention weights in the compute dtype.
        _Array(
            "saved for the backward pass",
            attention // machine.mesh["tensor"],
            value_bytes,
            model_config.remat == "none" and machine.platform == "cpu",
        ),
    )
    head, layer = _head(model_config, machine, tokens), _layer(model_config, machine, tokens)
    if machine.platform == "tpu":
        weights = flops.weights_per_device(model_config, machine.mesh, of_layers=True)
        is_converted = model_config.dtype != model_config.param_dtype
        converted = _terms(_Array("converted layer weights", weights, value_bytes, is_converted))
        return always | converted | head | layer
    return always | max(layer, head, key=lambda terms: sum(terms.values()))


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
    saves_norms = not (holder == "none" and model_config.lora_targets)  # Frozen weights have no gradients.
    parts = {
        "blockwise": is_blockwise,
        "pre_norm": model_config.pre_norm,
        "norm": model_config.pre_norm and saves_norms,
        "qk_norm": model_config.qk_norm,
        "trained_qk_norm": (model_config.qk_norm and saves_norms) or holder == "layer",
        "post_norm": model_config.post_norm,
        "trained_post_norm": model_config.post_norm and saves_norms,
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
    float32_values = FLOAT32_BYTES // _activation_bytes(model_config, machine)
    float32_parts = NORMALIZED if model_config.float32_norm and holder == "none" else ()

    def values_of(is_split: bool) -> int:
        arrays = (array for array in held if array.split == is_split)
        sizes = ((widths[array.width], array.is_float32 or array.part in float32_parts) for array in arrays)
        return sum(width * (float32_values if is_float32 else 1) for width, is_float32 in sizes)

    return values_of(True) // machine.mesh["tensor"] + values_of(False)


def _head(model_config: ModelConfig, machine: Machine, tokens: int) -> dict[str, int]:
    """Plans the backward pass of the head. It runs in chunks of tokens, and every device gathers the full head."""
    value_bytes, is_cpu, is_tpu = bytes_of(model_config.dtype), machine.platform == "cpu", machine.platform == "tpu"
    is_parameter = machine.weight_shards == 1 and model_config.dtype == model_config.param_dtype
    is_trained = not model_config.lora_targets  # The gradient of a frozen head is not computed.
    head = model_config.vocab_size * model_config.hidden_size
    chunk = min(chunk_size(machine.device, model_config.vocab_size), tokens)
    chunk_logits = chunk * model_config.vocab_size
    # Memory that the logits share with the head gradient of the chunk, on TPUs.
    shared = min(chunk, model_config.hidden_size) * model_config.vocab_size
    sums, logits = "head gradient sums", "logits of a chunk"
    return _terms(
        _Array("gathered head", head, value_bytes, not is_parameter),
        _Array(sums, head, FLOAT32_BYTES, is_trained),  # Sum over all chunks.
        # Gradient of one chunk, before it is added to the sum. Matmuls on GPUs add it without storing it.
        _Array(sums, head, FLOAT32_BYTES, is_trained and machine.platform != "gpu"),
        _Array(sums, head, FLOAT32_BYTES, is_trained and is_tpu and machine.mesh["fsdp"] > 4),  # Sum over devices.
        _Array(logits, chunk_logits, FLOAT32_BYTES),
        _Array(logits, chunk_logits, FLOAT32_BYTES if is_cpu else value_bytes),  # Gradient of the logits.
        _Array(logits, chunk_logits, FLOAT32_BYTES, is_cpu),  # Copy of the logits or their gradient.
        _Array(logits, -shared, FLOAT32_BYTES, is_tpu),
        _Array("hidden states", 3 * tokens // machine.mesh["tensor"] * model_config.hidden_size, value_bytes),
    )


def _layer(model_config: ModelConfig, machine: Machine, tokens: int) -> dict[str, int]:
    """Plans the backward pass of a layer during its MLP.

    A device then holds arrays and weights of the layer, gradients of the MLP weights, and the gradient of the head.
    """
    value_bytes, is_trained = bytes_of(model_config.dtype), not model_config.lora_targets
    is_copied = machine.mesh["fsdp"] > 1 or model_config.dtype != model_config.param_dtype
    weights = (
        flops.weights_per_device(model_config, machine.mesh, ("fsdp",), of_layers=True) // model_config.num_layers
        + is_trained * 3 * model_config.hidden_size * model_config.mlp_size // machine.mesh["tensor"]
    )
    # The gradients of the weights of a period are float32.
    num_periods = model_config.periods[0]
    period = flops.weights_per_device(model_config, machine.mesh, of_layers=True) // num_periods
    # The gradients of all local experts are float32.
    experts = 3 * model_config.num_experts * model_config.hidden_size * model_config.mlp_size
    # Each device gathers the inputs of the experts and the gradients of their outputs over `expert`.
    gathered = 2 * (machine.mesh["expert"] - 1) * model_config.hidden_size * tokens
    values = sum(layer_values(model_config, machine, "layer", stack) for stack in model_config.stacks)
    head = model_config.vocab_size * model_config.hidden_size
    return _terms(
        _Array("layer activations", values * tokens + gathered, _activation_bytes(model_config, machine)),
        _Array("layer weights and gradients", weights, value_bytes, is_copied),
        _Array("layer weights and gradients", period, FLOAT32_BYTES, is_trained and num_periods > 1),
        _Array(
            "layer weights and gradients",
            experts // (machine.mesh["expert"] * machine.mesh["tensor"]),
            FLOAT32_BYTES,
            is_trained and model_config.num_experts > 0,
        ),
        _Array("head gradient", head // machine.weight_shards, value_bytes, is_trained),
    )


def _layer_weights(model_config: ModelConfig, machine: Machine, is_counted: Callable[[Sequence[str]], bool]) -> int:
    """Returns the number of elements per device of the matrices of layers whose axes satisfy a condition."""
    declared, sizes = declared_weights(model_config), flops.matrix_sizes(model_config).items()
    counted = {path: size for path, size in sizes if flops.is_of_layers(path) and is_counted(declared[path].axes)}
    return flops.elements_per_device(model_config, counted, machine.mesh)


def _terms(*arrays: _Array) -> dict[str, int]:
    """Sums the bytes of the arrays by term."""
    terms = dict.fromkeys((array.term for array in arrays), 0)
    for array in arrays:
        terms[array.term] += array.elements * array.element_bytes * array.is_held
    return terms


def _activation_bytes(model_config: ModelConfig, machine: Machine) -> int:
    """Returns the bytes of one activation. Programs for CPUs hold bfloat16 activations in float32."""
    return FLOAT32_BYTES if machine.device == "cpu" else bytes_of(model_config.dtype)


def bytes_of(dtype: str) -> int:
    """Returns the bytes of one element of a dtype."""
    return np.dtype(dtype).itemsize
