"""Plans how much memory a configuration needs on each device. Needs no devices, weights or compiler.

A device always holds the parameters and moments, plus the arrays of the current stage. The largest stage is the peak.
The terms of a plan are arrays that compiled programs were seen to hold, in bytes of their types there;
`tests/memory_plan/test_plan.py` compares the sums with compiled programs. On a CPU, the process itself takes some of
the same memory.
"""

import bisect
import dataclasses
from collections.abc import Mapping

from poly_epo_jax.config.keys import Config, longest_sequence
from poly_epo_jax.memory_plan.gradient import FLOAT32, bytes_of, gradient_bytes
from poly_epo_jax.model import flops
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.qwen3 import AUTO, REMAT_POLICIES
from poly_epo_jax.parallel.devices import Setting
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.step.packing import fillable_rows, row_tokens, rows_per_device

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
    """Plans a configuration on a machine.

    Args:
      shape: Shape of the model. If its `remat` is AUTO, `choose_remat` replaces it.
      memory_bytes: Memory of each device that JAX may use. None if unknown.
      num_rows: Rows per device. If 0, the configuration's own number.
    """
    remat = choose_remat(config, shape, setting, memory_bytes, num_rows) if shape.remat == AUTO else shape.remat
    return _plan(config, dataclasses.replace(shape, remat=remat), setting, memory_bytes, num_rows)


def choose_remat(
    config: Config, shape: ModelConfig, setting: Setting, memory_bytes: int | None, num_rows: int = 0
) -> str:
    """Returns the remat policy that recomputes least among those whose plan leaves SPARE of the memory free.

    If no plan does, or if the memory is unknown, returns the policy that keeps least. Arguments as for `make_plan`.
    """
    room = (memory_bytes or 0) * (1 - SPARE)
    fitting = (
        word
        for word in REMAT_POLICIES  # ordered by how much they keep, the most first
        if _plan(config, dataclasses.replace(shape, remat=word), setting, memory_bytes, num_rows).needed_bytes <= room
    )
    return next(fitting, list(REMAT_POLICIES)[-1])


def _plan(config: Config, shape: ModelConfig, setting: Setting, memory_bytes: int | None, num_rows: int) -> Plan:
    rows = num_rows or rows_per_device(config, setting.mesh)
    stages = {
        "gradient": gradient_bytes(config, shape, setting, rows),
        "optimizer": _optimizer(config, shape, setting),
    }
    besides = _besides(stages, setting) if setting.platform == "cpu" else {}
    resident = _resident(config, shape, setting)
    cache_growth = SAMPLERS[config.rollouts.name].cache_growth
    if cache_growth is not None:
        laid_out = flops.total_weights(shape) * bytes_of(shape.dtype) // setting.weight_shards
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
    cells = max(algo.num_sets, train.num_generations) * train.num_generations
    return train.prompts_per_batch * (40 * train.num_generations * longest_sequence(config) + FLOAT32 * cells)


def _resident(config: Config, shape: ModelConfig, setting: Setting) -> dict[str, int]:
    """The bytes that are always held. Norms and biases are left out: they take less than a thousandth."""
    weights = flops.total_weights(shape) // setting.weight_shards
    parameters = weights * bytes_of(shape.param_dtype)
    trained = flops.trained_elements(config, shape, setting.mesh)
    moments = trained * (bytes_of(config.optimizer.first_moment_dtype) + FLOAT32)
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


def _optimizer(config: Config, shape: ModelConfig, setting: Setting) -> dict[str, int]:
    """The gradients. Weights and moments are changed in place; an accelerator computes the updates' norm there as well.

    On a CPU, the updates exist in full before they are added, because their norm is measured.
    """
    trained = flops.trained_elements(config, shape, setting.mesh)
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
    value_bytes, tensor = bytes_of(shape.dtype), setting.mesh["tensor"]
    per_token = flops.cache_bytes_per_token(shape, value_bytes) // tensor
    gathered = flops.total_weights(shape) // tensor * value_bytes if setting.mesh["fsdp"] > 1 else 0
    return {
        "the whole weights, gathered": gathered,
        "keys and values": int(cache_growth * slots * longest_sequence(config) * per_token),
        "prompts' keys and values": prompts * (1 << (train.max_prompt_tokens - 1).bit_length()) * per_token,
        "logits": 3 * slots * shape.vocab_size * FLOAT32,
    }
