"""How much memory each device needs for a configuration, by arithmetic alone, without devices, weights or a compiler.

A device always holds the parameters and moments, plus what the current stage needs; the largest stage is the peak. The
terms are the arrays that compiled programs were seen to hold, in bytes of the types that they hold them in.
`tests/memory_plan/test_plan.py` compares their sum with compiled programs. On a CPU, the process itself takes some of
the same memory.
"""

import bisect
import dataclasses
from collections.abc import Mapping

import numpy as np

from poly_epo_jax.config.keys import Config
from poly_epo_jax.model import flops
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.flops import trained_elements
from poly_epo_jax.model.logprobs import chunk_size
from poly_epo_jax.model.qwen3 import AUTO, REMAT_POLICIES
from poly_epo_jax.parallel.devices import Setting
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.step.packing import fillable_rows, row_tokens, rows_per_device

FLOAT32 = 4
SPARE = 0.1
"""The share of memory to leave free when a setting is chosen by plan: plans are within 10% of compiled programs."""

PROCESS = 650_000_000
"""Bytes of a process that trains the quick start's tiny policy on a CPU: Python, its libraries, compiled programs."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes on one device, by the name of what takes them: `resident` always, and one of `stages` at a time.

    On a CPU, the process as a whole takes the bytes in `besides` as well.
    """

    setting: Setting
    rows_per_device: int
    row_tokens: int
    remat: str
    resident: Mapping[str, int]
    stages: Mapping[str, Mapping[str, int]]
    besides: Mapping[str, int]
    memory_bytes: int | None  # that JAX may use; None if not known

    def stage_bytes(self, name: str) -> int:
        """The bytes that the device holds while the stage runs."""
        return sum(self.resident.values()) + sum(self.stages[name].values())

    @property
    def peak_stage(self) -> str:
        return max(self.stages, key=self.stage_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that the device's programs hold."""
        return self.stage_bytes(self.peak_stage)

    @property
    def needed_bytes(self) -> int:
        """The bytes needed on the device, including its share of what the process takes besides."""
        return self.peak_bytes + sum(self.besides.values()) // self.setting.num_devices

    @property
    def fits(self) -> bool:
        """Whether the device has that much memory; True if its memory is not known."""
        return self.memory_bytes is None or self.needed_bytes <= self.memory_bytes


def make_plan(
    config: Config, shape: ModelConfig, setting: Setting, memory_bytes: int | None, num_rows: int = 0
) -> Plan:
    """The plan of a configuration, with its own train.rows_per_device unless `num_rows` is given.

    If the shape's remat is AUTO, the plan uses the remat word that recomputes least among those that leave SPARE free.
    If there is none, or the memory is not known, it uses the word that keeps least. The plan's `remat` says which.
    """
    if shape.remat == AUTO:
        plans = [
            make_plan(config, dataclasses.replace(shape, remat=word), setting, memory_bytes, num_rows)
            for word in REMAT_POLICIES  # ordered by how much they keep, the most first
        ]
        room = (memory_bytes or 0) * (1 - SPARE)
        return next((plan for plan in plans if plan.needed_bytes <= room), plans[-1])
    rows = num_rows or rows_per_device(config, setting.mesh)
    stages = {
        "gradient": _gradient(config, shape, setting, rows),
        "optimizer": _optimizer(config, shape, setting),
    }
    besides = _besides(stages, setting) if setting.platform == "cpu" else {}
    resident = _resident(config, shape, setting)
    cache_growth = SAMPLERS[config.rollouts.name].cache_growth
    if cache_growth is not None:
        laid_out = flops.total_weights(shape) * _bytes_of(shape.dtype) // setting.weight_shards
        stages["generate"] = _generate(config, shape, setting, cache_growth)
        held = stages["generate"] if SAMPLERS[config.rollouts.name].has_slots else resident
        held["weights laid out for decoding"] = laid_out
    return Plan(setting, rows, row_tokens(config), shape.remat, resident, stages, besides, memory_bytes)


def largest_rows(config: Config, shape: ModelConfig, setting: Setting, memory_bytes: int | None) -> int:
    """The largest train.rows_per_device that fits and that a minibatch can fill; 0 if not even one row fits.

    If the memory is not known, this is the configuration's own value.
    """
    if memory_bytes is None:
        return rows_per_device(config, setting.mesh)
    rows = fillable_rows(config, setting.mesh)
    return bisect.bisect_left(
        range(1, max(1, rows) + 1), True, key=lambda n: not make_plan(config, shape, setting, memory_bytes, n).fits
    )


def batch_bytes(config: Config) -> int:
    """The bytes of a step's batch on a host that has all of it: 40 bytes per token, plus the batch's sets or pairs."""
    train, algo = config.train, config.algo
    longest = train.max_prompt_tokens + config.sampling.max_tokens
    cells = max(algo.num_sets, train.num_generations) * train.num_generations
    return train.prompts_per_batch * (40 * train.num_generations * longest + FLOAT32 * cells)


def _resident(config: Config, shape: ModelConfig, setting: Setting) -> dict[str, int]:
    """The bytes that are always held. Norms and biases are left out: they take less than a thousandth."""
    weights = flops.total_weights(shape) // setting.weight_shards
    parameters = weights * _bytes_of(shape.param_dtype)
    trained = trained_elements(config, shape, setting.mesh)
    moments = trained * (_bytes_of(config.optimizer.first_moment_dtype) + FLOAT32)
    adapter = {"adapter": trained * FLOAT32} if shape.lora_targets else {}
    reference = {"reference policy": adapter.get("adapter", parameters)} if config.algo.kl_coef else {}
    return {"parameters": parameters} | adapter | {"optimizer moments": moments} | reference


def _besides(update: Mapping[str, Mapping[str, int]], setting: Setting) -> dict[str, int]:
    """The bytes that the process takes besides, on all devices; `update` are the stages of the update.

    A program for CPUs allocates all that it computes with in one piece. malloc keeps the piece when it is freed, but
    gives parts of it to others; so the next time it is no longer whole, and malloc takes another from the system.
    """
    pieces = sum(sum(terms.values()) - terms["sum of gradients"] for terms in update.values())
    return {
        "what malloc keeps in pieces": pieces * setting.num_devices,
        "Python, libraries and programs": PROCESS,
    }


def _gradient(config: Config, shape: ModelConfig, setting: Setting, rows: int) -> dict[str, int]:
    """One microbatch's forward and backward pass: what is kept for the backward pass, and the larger of its two parts.

    The backward pass goes through the head first, then through the layers. TPU programs allocate both parts separately,
    and convert the weights of all layers to the compute type before the loop over layers.
    """
    tokens = rows * row_tokens(config)
    kept = _kept_values(shape, setting) * tokens * _activation_bytes(shape, setting)
    if shape.remat == "none":  # then the attention's weights are kept in the compute type too
        attention = shape.num_layers * shape.hidden_size * _head_widths(shape) * 2
        kept += attention // setting.mesh["tensor"] * _bytes_of(shape.dtype)
    head, layer = _head(shape, setting, tokens), _layer(shape, setting, tokens)
    trained = trained_elements(config, shape, setting.mesh)
    always = {"sum of gradients": trained * FLOAT32, "kept for the backward pass": int(kept)}
    if setting.platform == "tpu":
        converted = flops.layer_weights(shape) // setting.weight_shards * _bytes_of(shape.dtype)
        converted = 0 if shape.dtype == shape.param_dtype else converted
        return always | {"layers' weights, converted": converted} | head | layer
    return always | (head if sum(head.values()) > sum(layer.values()) else layer)


def _head(shape: ModelConfig, setting: Setting, tokens: int) -> dict[str, int]:
    """The head's backward pass in chunks: every device holds the whole head, its gradient and a chunk's logits.

    The head's gradient is held twice, because a chunk's share is computed before it is added. Accelerators hold logits
    in float32 and their gradient in the compute type; TPUs put the logits in the place of that share. On a CPU both are
    float32, and one of them is held twice. If a TPU sums the head's gradient over more than four chips, it holds that
    gradient once more.
    """
    elements = shape.vocab_size * shape.hidden_size
    value_bytes = _bytes_of(shape.dtype)
    gathered = elements * value_bytes
    if setting.weight_shards == 1 and shape.dtype == shape.param_dtype:
        gathered = 0  # the parameter itself
    chunk = min(chunk_size(setting.device, shape.vocab_size), tokens)
    is_tpu = setting.platform == "tpu"
    sums = (3 if is_tpu and setting.mesh["fsdp"] > 4 else 2) * elements * FLOAT32
    sums = 0 if shape.lora_targets else sums  # a frozen head needs no gradient
    logits = chunk * shape.vocab_size * (3 * FLOAT32 if setting.platform == "cpu" else FLOAT32 + value_bytes)
    if is_tpu:
        logits -= min(chunk, shape.hidden_size) * shape.vocab_size * FLOAT32
    hidden = 3 * tokens // setting.mesh["tensor"] * shape.hidden_size * value_bytes
    return {
        "the whole head": gathered,
        "sums of the head's gradient": sums,
        "logits of a chunk": logits,
        "hidden states": hidden,
    }


def _layer(shape: ModelConfig, setting: Setting, tokens: int) -> dict[str, int]:
    """A layer's backward pass at its MLP: all results of the forward pass, the MLP's gradients, the layer's weights."""
    value_bytes, tensor = _bytes_of(shape.dtype), setting.mesh["tensor"]
    weights = 0
    if setting.mesh["fsdp"] > 1 or shape.dtype != shape.param_dtype:
        mlp = 0 if shape.lora_targets else 3 * shape.hidden_size * shape.mlp_size
        weights = (flops.layer_weights(shape) // shape.num_layers + mlp) // tensor * value_bytes
    return {
        "a layer's activations": _layer_values(shape, setting) * tokens * _activation_bytes(shape, setting),
        "a layer's weights and gradients": weights,
        "the head's gradient": 0
        if shape.lora_targets
        else shape.vocab_size * shape.hidden_size // setting.weight_shards * value_bytes,
    }


def _layer_values(shape: ModelConfig, setting: Setting) -> int:
    """Values per token that a layer holds at once during the backward pass of its MLP.

    As wide as the MLP: gate, up, silu(gate), their product, and the gradients of the product and of one factor. As wide
    as the residual stream: the input, the input after attention, both of them normalised, and the incoming gradient. As
    wide as the query heads: queries before and after rotation, and the attention's result. As wide as the key heads:
    keys before, between and after normalisation and rotation, and values. On a CPU, matmuls need some of these
    transposed, and the blockwise attention holds blocks and initial sums.
    """
    mlp, stream, heads, kv_heads = (6, 7, 5, 6) if _is_blockwise(shape, setting) else (6, 5, 3, 4)
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensor = setting.mesh["tensor"]
    return (mlp * shape.mlp_size + heads * q + kv_heads * kv) // tensor + stream * shape.hidden_size


def _kept_values(shape: ModelConfig, setting: Setting) -> int:
    """Values per token that all layers keep for the backward pass, which `remat` decides.

    Each layer's input is also split over the tensor axis, by tokens. With remat=none, all of `_layer_values` is kept,
    except the inputs of the norms' weights if these are frozen. With remat=dots, an adapter's product is kept as well
    as its weight's.
    """
    tensor, width = setting.mesh["tensor"], shape.num_heads * shape.head_dim
    kv_width = shape.num_kv_heads * shape.head_dim
    if shape.remat == "none":
        frozen = 2 * shape.hidden_size + (width + kv_width) // tensor * shape.qk_norm if shape.lora_targets else 0
        return shape.num_layers * (_layer_values(shape, setting) - frozen)
    kept = shape.hidden_size
    if shape.remat in ("attention", "dots"):
        kept += width
    if shape.remat == "dots":
        widths = {"gate": shape.mlp_size, "up": shape.mlp_size, "q": width, "k": kv_width, "v": kv_width}
        widths["o"] = shape.hidden_size
        kept += sum(size * (1 + (name in shape.lora_targets)) for name, size in widths.items())
    return shape.num_layers * (kept // tensor)


def _optimizer(config: Config, shape: ModelConfig, setting: Setting) -> dict[str, int]:
    """The gradients. Weights and moments are changed in place; an accelerator computes the updates' norm there as well.

    On a CPU, the updates exist in full before they are added, because their norm is measured.
    """
    trained = trained_elements(config, shape, setting.mesh)
    updates = {"updates": trained * FLOAT32} if setting.platform == "cpu" else {}
    return {"sum of gradients": trained * FLOAT32} | updates


def _generate(config: Config, shape: ModelConfig, setting: Setting, cache_growth: float) -> dict[str, int]:
    """A whole copy of the weights; the slots' caches at full length, with what they take besides while they grow; the
    prompts' caches; and logits.
    """
    train, shards, held_out = config.train, setting.row_shards, config.eval
    requests = train.prompts_per_batch * train.num_generations
    if held_out.every:
        requests = max(requests, held_out.num_problems * held_out.num_generations)
    slots = -(-min(config.rollouts.max_concurrent, requests) // shards)  # per device
    prompts = -(-max(1, slots * shards // train.num_generations) // shards)
    value_bytes, tensor = _bytes_of(shape.dtype), setting.mesh["tensor"]
    per_token = flops.cache_bytes_per_token(shape, value_bytes) // tensor
    gathered = flops.total_weights(shape) // tensor * value_bytes if setting.mesh["fsdp"] > 1 else 0
    length = train.max_prompt_tokens + config.sampling.max_tokens
    return {
        "the whole weights, gathered": gathered,
        "keys and values": int(cache_growth * slots * length * per_token),
        "prompts' keys and values": prompts * (1 << (train.max_prompt_tokens - 1).bit_length()) * per_token,
        "logits": 3 * slots * shape.vocab_size * FLOAT32,
    }


def _head_widths(shape: ModelConfig) -> int:
    return shape.head_dim * (shape.num_heads + shape.num_kv_heads)


def _is_blockwise(shape: ModelConfig, setting: Setting) -> bool:
    return shape.attention == "blockwise" or (shape.attention == "auto" and setting.device == "cpu")


def _activation_bytes(shape: ModelConfig, setting: Setting) -> int:
    """Bytes of one value. CPUs multiply only in float32, so values that are bfloat16 elsewhere are float32 there."""
    return FLOAT32 if setting.device == "cpu" else _bytes_of(shape.dtype)


def _bytes_of(dtype: str) -> int:
    return np.dtype(dtype).itemsize
