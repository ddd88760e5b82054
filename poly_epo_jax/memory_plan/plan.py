"""How much memory each device needs for a configuration, by arithmetic alone, without devices, weights or a compiler.

A device always holds parameters and moments, and beside them what the current stage needs; the largest stage is the
peak. The terms are what compiled programs were seen to hold, in bytes of the type that they hold it in.
`tests/memory_plan/test_plan.py` compares their sum with compiled programs.
"""

import bisect
import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from poly_epo_jax.config import Config
from poly_epo_jax.model import flops
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.logprobs import ACCELERATOR_CHUNK_TOKENS, CHUNK_TOKENS
from poly_epo_jax.model.partition import is_trainable
from poly_epo_jax.rollouts import SAMPLERS

FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class Setting:
    """The machine of a plan: the kind of device, a key of DEVICES or "", and the sizes of the mesh's axes."""

    device: str
    mesh: Mapping[str, int]

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def row_shards(self) -> int:
        return self.mesh["data"] * self.mesh["fsdp"]

    @property
    def weight_shards(self) -> int:
        return self.mesh["fsdp"] * self.mesh["tensor"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes of one device, each by the name of what takes them: `resident` always, and one of `stages` at a time."""

    setting: Setting
    rows_per_device: int
    row_tokens: int
    resident: Mapping[str, int]
    stages: Mapping[str, Mapping[str, int]]
    memory_bytes: int | None  # that JAX may use; None where it is not known

    def stage_bytes(self, name: str) -> int:
        """All that the device holds while the stage runs."""
        return sum(self.resident.values()) + sum(self.stages[name].values())

    @property
    def peak_stage(self) -> str:
        return max(self.stages, key=self.stage_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.stage_bytes(self.peak_stage)

    @property
    def fits(self) -> bool:
        """True also where the memory is not known."""
        return self.memory_bytes is None or self.peak_bytes <= self.memory_bytes


def make_plan(
    config: Config, shape: ModelConfig, setting: Setting, memory_bytes: int | None, rows_per_device: int = 0
) -> Plan:
    """The plan of a configuration, with its train.rows_per_device where none is given."""
    rows = rows_per_device or config.train.rows_per_device
    stages = {
        "gradient": _gradient(config, shape, setting, rows),
        "optimizer": _optimizer(config, shape, setting),
    }
    resident = _resident(config, shape, setting)
    cache_growth = SAMPLERS[config.rollouts.name].cache_growth
    if cache_growth is not None:
        resident["weights laid out for decoding"] = (
            flops.total_weights(shape) * _bytes_of(shape.dtype) // setting.weight_shards
        )
        stages["generate"] = _generate(config, shape, setting, cache_growth)
    return Plan(setting, rows, config.train.row_tokens, resident, stages, memory_bytes)


def largest_rows(config: Config, shape: ModelConfig, setting: Setting, memory_bytes: int | None) -> int:
    """The largest train.rows_per_device that fits and that a minibatch can fill; 0 where not even one row fits.

    Where the memory is not known, it is the configuration's own.
    """
    if memory_bytes is None:
        return config.train.rows_per_device
    longest = config.train.max_prompt_tokens + config.sampling.max_tokens
    sequences = config.train.prompts_per_minibatch * config.train.num_generations
    rows = sequences // max(1, config.train.row_tokens // longest) // setting.row_shards
    return bisect.bisect_left(
        range(1, max(1, rows) + 1), True, key=lambda n: not make_plan(config, shape, setting, memory_bytes, n).fits
    )


def batch_bytes(config: Config) -> int:
    """What a step's batch takes on a host that has all of it: 40 bytes for a token, and its sets or pairs."""
    train, algo = config.train, config.algo
    longest = train.max_prompt_tokens + config.sampling.max_tokens
    cells = max(algo.num_sets, train.num_generations) * train.num_generations
    return train.prompts_per_batch * (40 * train.num_generations * longest + FLOAT32 * cells)


def _resident(config: Config, shape: ModelConfig, setting: Setting) -> dict[str, int]:
    """Norms and biases are left out: they take less than a thousandth."""
    weights = flops.total_weights(shape) // setting.weight_shards
    parameters = weights * _bytes_of(shape.param_dtype)
    trained = sum(_trained_sizes(config, shape)) // setting.weight_shards
    moments = trained * (_bytes_of(config.optimizer.first_moment_dtype) + FLOAT32)
    reference = {"reference policy": parameters} if config.algo.kl_coef else {}
    return {"parameters": parameters, "optimizer moments": moments} | reference


def _gradient(config: Config, shape: ModelConfig, setting: Setting, rows: int) -> dict[str, int]:
    """One microbatch's forward and backward pass: what is kept for the latter, and the larger of its two parts.

    The backward pass goes through the head first, then through the layers.
    """
    tokens = rows * config.train.row_tokens
    kept = _kept_values(shape, setting) * tokens * _activation_bytes(shape, setting)
    if shape.remat == "none":  # then the attention's weights are kept in the compute type, too
        attention = shape.num_layers * shape.hidden_size * _head_widths(shape) * 2
        kept += attention // setting.mesh["tensor"] * _bytes_of(shape.dtype)
    head, layer = _head(shape, setting, tokens), _layer(shape, setting, tokens)
    trained = sum(_trained_sizes(config, shape)) // setting.weight_shards
    larger = head if sum(head.values()) > sum(layer.values()) else layer
    return {"sum of gradients": trained * FLOAT32, "kept for the backward pass": int(kept)} | larger


def _head(shape: ModelConfig, setting: Setting, tokens: int) -> dict[str, int]:
    """The head's backward pass in chunks: every device holds the whole head, its gradient and a chunk's logits."""
    elements = shape.vocab_size * shape.hidden_size
    value_bytes = _bytes_of(shape.dtype)
    gathered = elements * value_bytes
    if setting.weight_shards == 1 and shape.dtype == shape.param_dtype:
        gathered = 0  # the parameter itself
    chunk = CHUNK_TOKENS["cpu"] if setting.device == "cpu" else ACCELERATOR_CHUNK_TOKENS
    hidden = 3 * tokens // setting.mesh["tensor"] * shape.hidden_size * value_bytes
    return {
        "the whole head": gathered,
        "sums of the head's gradient": 2 * elements * FLOAT32,
        "logits of a chunk": 3 * min(chunk, tokens) * shape.vocab_size * FLOAT32,
        "hidden states": hidden,
    }


def _layer(shape: ModelConfig, setting: Setting, tokens: int) -> dict[str, int]:
    """A layer's backward pass, at its MLP: all results of its forward pass, the MLP's gradients, and its weights."""
    value_bytes, tensor = _bytes_of(shape.dtype), setting.mesh["tensor"]
    weights = 0
    if setting.mesh["fsdp"] > 1 or shape.dtype != shape.param_dtype:
        mlp = 3 * shape.hidden_size * shape.mlp_size
        weights = (flops.layer_weights(shape) // shape.num_layers + mlp) // tensor * value_bytes
    return {
        "a layer's activations": _layer_values(shape, setting) * tokens * _activation_bytes(shape, setting),
        "a layer's weights and gradients": weights,
        "the head's gradient": shape.vocab_size * shape.hidden_size // setting.weight_shards * value_bytes,
    }


def _layer_values(shape: ModelConfig, setting: Setting) -> int:
    """Values per token that a layer holds at once during the backward pass of its MLP.

    As wide as the MLP: gate, up, silu(gate), their product, and the gradients of the product and of one factor. As wide
    as the stream: the input, the input after attention, both normalised, and the incoming gradient. As wide as the
    query heads: queries before and after rotation, and the attention's result. As wide as the key heads: keys before,
    between and after normalisation and rotation, and values. On a CPU, matmuls need some of them transposed, and the
    blockwise attention holds blocks and initial sums.
    """
    mlp, stream, heads, kv_heads = (6, 7, 5, 6) if _is_blockwise(shape, setting) else (6, 5, 3, 4)
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensor = setting.mesh["tensor"]
    return (mlp * shape.mlp_size + heads * q + kv_heads * kv) // tensor + stream * shape.hidden_size


def _kept_values(shape: ModelConfig, setting: Setting) -> int:
    """Values per token that all layers keep for the backward pass; `remat` decides.

    Each layer's input is also split over tensor, by tokens. With remat=none all of `_layer_values` is kept.
    """
    tensor, width = setting.mesh["tensor"], shape.num_heads * shape.head_dim
    kept = shape.hidden_size
    if shape.remat in ("attention", "dots"):
        # The blockwise form keeps its result in blocks as well as in rows.
        kept += (2 if _is_blockwise(shape, setting) else 1) * width
    if shape.remat == "dots":
        kept += 2 * shape.mlp_size + width + 2 * shape.num_kv_heads * shape.head_dim + shape.hidden_size
    per_layer = _layer_values(shape, setting) if shape.remat == "none" else kept // tensor
    return shape.num_layers * per_layer


def _optimizer(config: Config, shape: ModelConfig, setting: Setting) -> dict[str, int]:
    """The gradients and the updates, which exist in full before they are added, because their norm is measured."""
    sizes = _trained_sizes(config, shape)
    trained, largest = sum(sizes) // setting.weight_shards, max(sizes, default=0) // setting.weight_shards
    return {"sum of gradients": trained * FLOAT32, "updates": (trained + largest) * FLOAT32}


def _trained_sizes(config: Config, shape: ModelConfig) -> list[int]:
    """Elements of each matrix that train.trainable names. Activations are counted as if all were trained."""
    return [size for path, size in flops.matrix_sizes(shape).items() if is_trainable(path, config.train.trainable)]


def _generate(config: Config, shape: ModelConfig, setting: Setting, cache_growth: float) -> dict[str, int]:
    """The slots' caches at full length, with what they take besides while they grow; the prompts' own; and logits."""
    train, shards = config.train, setting.row_shards
    requests = train.prompts_per_batch * train.num_generations
    slots = -(-min(config.rollouts.max_concurrent, requests) // shards)  # per device
    prompts = -(-max(1, slots * shards // train.num_generations) // shards)
    per_token = flops.cache_bytes_per_token(shape, _bytes_of(shape.dtype)) // setting.mesh["tensor"]
    length = train.max_prompt_tokens + config.sampling.max_tokens
    return {
        "keys and values": int(cache_growth * slots * length * per_token),
        "prompts' keys and values": prompts * (1 << (train.max_prompt_tokens - 1).bit_length()) * per_token,
        "logits": 3 * slots * shape.vocab_size * FLOAT32,
    }


def _head_widths(shape: ModelConfig) -> int:
    return shape.head_dim * (shape.num_heads + shape.num_kv_heads)


def _is_blockwise(shape: ModelConfig, setting: Setting) -> bool:
    return shape.attention == "blockwise" or (shape.attention == "auto" and setting.device == "cpu")


def _activation_bytes(shape: ModelConfig, setting: Setting) -> int:
    """Bytes of one value. CPUs multiply in float32 only, so what is bfloat16 elsewhere is float32 there."""
    return FLOAT32 if setting.device == "cpu" else _bytes_of(shape.dtype)


def _bytes_of(dtype: str) -> int:
    return np.dtype(dtype).itemsize
