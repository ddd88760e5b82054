"""Plans the memory of the gradient: the forward and backward pass of one microbatch.

Each array that compiled programs were observed to hold has one entry. `layer_arrays.py` lists the arrays of a layer,
and `gradient_bytes`, `_head` and `_layer` list the others. benchmarks/memory_grid.py and
`tests/memory_plan/test_plan.py` compare the sums with compiled programs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from poly_epo_jax.config.keys import Config
from poly_epo_jax.memory_plan.layer_arrays import FLOAT32_BYTES, activation_bytes, bytes_of, layer_values
from poly_epo_jax.model import flops
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.logprobs import chunk_size
from poly_epo_jax.model.transformer import declared_weights
from poly_epo_jax.parallel.devices import Machine
from poly_epo_jax.step.packing import row_tokens


class _Array(NamedTuple):
    """An array, the term of the plan that includes it, and whether a device holds it in this configuration."""

    term: str
    elements: int
    element_bytes: int
    is_held: bool = True


def gradient_bytes(config: Config, model_config: ModelConfig, machine: Machine, rows: int) -> dict[str, int]:
    """Plans the forward and backward pass of one microbatch on one device.

    The backward pass processes the head first and then the layers, so only the larger of these two parts counts.
    Programs for TPUs convert the weights of all layers to the compute dtype before the loop over layers.

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
    # Sums over devices that have the same weights run after the loop over layers, on CPUs only those over `expert`.
    is_summed = machine.platform != "tpu" and machine.mesh["expert"] > 1
    is_summed |= machine.platform == "gpu" and machine.mesh["data"] > 1
    summed = _layer_weights(model_config, machine, lambda axes: "num_experts" not in axes)
    # GPUs gather along the first axis of an array. Other weights are transposed before the loop.
    is_transposed = machine.platform == "gpu" and machine.mesh["fsdp"] > 1
    transposed = _layer_weights(model_config, machine, lambda axes: axes[1] != "hidden_size")
    is_converted = machine.platform == "tpu" and model_config.dtype != model_config.param_dtype
    converted = flops.weights_per_device(model_config, machine.mesh, of_layers=True)
    always = _terms(
        _Array("sum of gradients", trained, FLOAT32_BYTES),
        _Array("gradients before their sum", summed, FLOAT32_BYTES, is_summed and not model_config.lora_targets),
        _Array("converted layer weights", converted, bytes_of(model_config.dtype), is_converted),
        _Array("transposed weights", transposed, bytes_of(model_config.param_dtype), is_transposed),
        _Array("saved for the backward pass", kept, activation_bytes(model_config, machine)),
        # The attention weights in the compute dtype.
        _Array(
            "saved for the backward pass",
            attention // machine.mesh["tensor"],
            value_bytes,
            model_config.remat == "none" and machine.platform == "cpu",
        ),
    )
    head, layer = _head(model_config, machine, tokens), _layer(model_config, machine, tokens)
    return always | max(layer, head, key=lambda terms: sum(terms.values()))


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
    hidden = tokens // machine.mesh["tensor"] * model_config.hidden_size
    sums, logits = "head gradient sums", "logits of a chunk"
    # Programs that sum the head gradient over devices hold the sum and its input.
    is_summed = (is_tpu and machine.mesh["fsdp"] > 4) or (machine.platform == "gpu" and machine.mesh["data"] > 1)
    return _terms(
        _Array("gathered head", head, value_bytes, not is_parameter),
        _Array(sums, head, FLOAT32_BYTES, is_trained),  # Sum over all chunks.
        # Gradient of one chunk, before it is added to the sum. Matmuls on GPUs add it without storing it.
        _Array(sums, head, FLOAT32_BYTES, is_trained and machine.platform != "gpu"),
        _Array(sums, head, FLOAT32_BYTES, is_trained and is_summed),
        _Array(logits, chunk_logits, FLOAT32_BYTES),
        # Gradient of the logits. Programs for TPUs have no separate buffer for it.
        _Array(logits, chunk_logits, FLOAT32_BYTES if is_cpu else value_bytes, not is_tpu),
        _Array(logits, chunk_logits, FLOAT32_BYTES, is_cpu),  # Copy of the logits or their gradient.
        _Array(logits, -shared, FLOAT32_BYTES, is_tpu and is_trained),
        # Input, output and gradient of the final norm. Programs for CPUs also hold the input divided by its RMS.
        _Array("hidden states", (3 + is_cpu) * hidden, activation_bytes(model_config, machine)),
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
        _Array("layer activations", values * tokens + gathered, activation_bytes(model_config, machine)),
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
