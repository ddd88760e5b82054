"""Plans the memory that a configuration needs on each device, without devices, weights or a compiler.

A device always holds the parameters and optimizer moments, and in addition the arrays of the current stage. The stage
with the largest sum determines the peak. The terms of a plan are arrays that compiled programs were observed to hold,
with the dtypes of these programs. `tests/memory_plan/test_plan.py` compares the sums with compiled programs. On a CPU,
the process itself also needs memory.
"""

import bisect
import dataclasses
import os
from collections.abc import Mapping

import jax

from poly_epo_jax.config.keys import Config, max_draws, max_sequence_tokens
from poly_epo_jax.config.machines import MESHES
from poly_epo_jax.memory_plan.gradient import gradient_bytes
from poly_epo_jax.memory_plan.layer_arrays import FLOAT32_BYTES, bytes_of
from poly_epo_jax.model import flops
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.transformer import AUTO, REMAT_POLICIES
from poly_epo_jax.parallel.devices import DEVICES, Machine, device_name, find_devices
from poly_epo_jax.parallel.mesh import check_mesh, fill_mesh, row_shards
from poly_epo_jax.rollouts import SAMPLERS, pushed_dtype
from poly_epo_jax.step.packing import fillable_rows, row_tokens, rows_per_device
from poly_epo_jax.system.limits import memory_limit

MEMORY_HEADROOM = 0.1
"""Fraction of the memory that an automatic choice leaves free. Plans are within 10% of compiled programs."""

PROCESS_BYTES = 650_000_000
"""Bytes of a CPU process that trains the policy of the quick start: Python, its libraries and compiled programs."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A memory plan.

    Attributes:
      machine: The machine.
      rows_per_device: Rows per microbatch on each group of `tensor` devices.
      row_tokens: Number of tokens of a row.
      remat: Rematerialization policy.
      resident: Bytes that a device always holds, by term.
      stages: Bytes that a device holds in addition during each stage, by term. Stages run one at a time.
      process_overhead: Bytes that a CPU process needs in addition for all its devices, by term.
      memory_bytes: Bytes of each device that JAX may use. None if unknown.
    """

    machine: Machine
    rows_per_device: int
    row_tokens: int
    remat: str
    resident: Mapping[str, int]
    stages: Mapping[str, Mapping[str, int]]
    process_overhead: Mapping[str, int]
    memory_bytes: int | None

    def stage_bytes(self, name: str) -> int:
        """Returns the bytes that a device holds during a stage."""
        return sum(self.resident.values()) + sum(self.stages[name].values())

    @property
    def peak_stage(self) -> str:
        """Name of the stage that needs the most memory."""
        return max(self.stages, key=self.stage_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the compiled programs on one device."""
        return self.stage_bytes(self.peak_stage)

    @property
    def needed_bytes(self) -> int:
        """Peak bytes on one device, including its share of the process overhead."""
        return self.peak_bytes + sum(self.process_overhead.values()) // self.machine.num_devices

    @property
    def fits(self) -> bool:
        """True if the device has enough memory, or if its memory is unknown."""
        return self.memory_bytes is None or self.needed_bytes <= self.memory_bytes


def plan_of(config: Config, model_config: ModelConfig) -> tuple[Plan, int]:
    """Plans a configuration on the machine of `config.mesh` or, if it is not specified, on the local devices.

    Args:
      config: The configuration.
      model_config: The model configuration. If its `remat` is AUTO, the plan resolves it.

    Returns:
      The plan, and the maximum number of rows per device that fit with its `remat`.

    Raises:
      ConfigError: If the mesh does not fit the devices or the model.
    """
    machine, memory_bytes = machine_of(config)
    check_mesh(config.mesh, machine.mesh, dataclasses.asdict(model_config), row_tokens(config))
    plan = make_plan(config, model_config, machine, memory_bytes)
    return plan, max_rows(config, dataclasses.replace(model_config, remat=plan.remat), machine, memory_bytes)


def machine_of(config: Config) -> tuple[Machine, int | None]:
    """Returns the machine of a configuration, and the bytes of each device that JAX may use (None if unknown).

    CPU devices share the memory of the machine or, if it is smaller, the memory limit of the container, see
    `system/limits.py`.

    The local devices are only queried if `mesh.device_kind` or `mesh.num_devices` is not set.

    Raises:
      ConfigError: If JAX finds no devices, or if the devices cannot be arranged into the mesh.
    """
    mesh = config.mesh
    available = [] if mesh.device_kind and mesh.num_devices else find_devices()
    device = mesh.device_kind or device_name(available[0].device_kind)
    count = mesh.num_devices or len(available)
    machine = Machine(device, fill_mesh(mesh, count), _num_processes(config, device, count))
    if available and (limit := (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")):
        return machine, limit
    if device == "cpu":
        return machine, memory_limit() // machine.num_devices
    if not device:
        return machine, None
    share = DEVICES[device].jax_share
    if share < 1:
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", share))
    return machine, int(share * (DEVICES[device].memory_bytes or 0))


def _num_processes(config: Config, device: str, num_devices: int) -> int:
    if jax.distributed.is_initialized():
        return jax.process_count()
    presets = (mesh for mesh in MESHES.values() if (mesh["device_kind"], mesh["num_devices"]) == (device, num_devices))
    return next(presets, {"processes": config.hosts.num_processes})["processes"]


def make_plan(
    config: Config, model_config: ModelConfig, machine: Machine, memory_bytes: int | None, num_rows: int = 0
) -> Plan:
    """Plans the memory of a configuration on a machine.

    Args:
      config: The configuration.
      model_config: The model configuration. If its `remat` is AUTO, `choose_remat` replaces it.
      machine: The machine.
      memory_bytes: Bytes of each device that JAX may use. None if unknown.
      num_rows: Rows per device. If 0, the number of the configuration is used.
    """
    remat = (
        choose_remat(config, model_config, machine, memory_bytes, num_rows)
        if model_config.remat == AUTO
        else model_config.remat
    )
    return _plan(config, dataclasses.replace(model_config, remat=remat), machine, memory_bytes, num_rows)


def choose_remat(
    config: Config, model_config: ModelConfig, machine: Machine, memory_bytes: int | None, num_rows: int = 0
) -> str:
    """Returns the remat policy with the least recomputation whose plan leaves MEMORY_HEADROOM of the memory free.

    If there is no such policy, or if the memory is unknown, returns the policy that saves the least. The arguments are
    those of `make_plan`.
    """
    max_bytes = (memory_bytes or 0) * (1 - MEMORY_HEADROOM)
    fitting = (
        policy
        for policy in REMAT_POLICIES  # from the policy that saves the most to the policy that saves the least
        if _plan(config, dataclasses.replace(model_config, remat=policy), machine, memory_bytes, num_rows).needed_bytes
        <= max_bytes
    )
    return next(fitting, list(REMAT_POLICIES)[-1])


def _plan(config: Config, model_config: ModelConfig, machine: Machine, memory_bytes: int | None, num_rows: int) -> Plan:
    rows = num_rows or rows_per_device(config, machine.mesh)
    stages = {
        "gradient": gradient_bytes(config, model_config, machine, rows),
        "optimizer": _optimizer(config, model_config, machine),
    }
    process_overhead = _process_overhead(stages, machine) if machine.platform == "cpu" else {}
    resident = _resident(config, model_config, machine)
    cache_growth = SAMPLERS[config.rollouts.name].cache_growth
    on_host = flops.weights_per_device(model_config, machine.host.mesh)
    if machine.processes > 1:  # `params_on_host`; servers load the copy, and samplers in the process keep it
        copy = {"copy of the host": on_host * bytes_of(pushed_dtype(config, model_config))}
        stages["push weights"] = copy
        resident |= copy if cache_growth is not None else {}
    if cache_growth is not None:
        stages["generate"] = _generate(config, model_config, machine, cache_growth)
        held = stages["generate"] if SAMPLERS[config.rollouts.name].has_slots else resident
        held["decoding weights"] = on_host * bytes_of(model_config.dtype)
    return Plan(machine, rows, row_tokens(config), model_config.remat, resident, stages, process_overhead, memory_bytes)


def max_rows(config: Config, model_config: ModelConfig, machine: Machine, memory_bytes: int | None) -> int:
    """Returns the largest `train.rows_per_device` that fits into memory and that a minibatch can fill.

    The arguments are those of `make_plan`. Returns 0 if not even one row fits, and the number of rows of the
    configuration if the memory is unknown.
    """
    if memory_bytes is None:
        return rows_per_device(config, machine.mesh)
    rows = fillable_rows(config, machine.mesh)
    return bisect.bisect_left(
        range(1, max(1, rows) + 1),
        True,
        key=lambda n: not make_plan(config, model_config, machine, memory_bytes, n).fits,
    )


def batch_bytes(config: Config) -> int:
    """Returns the bytes of a step's full batch on a host: 40 per token, and 4 per (set, response) or response pair."""
    train, algo = config.train, config.algo
    cells = max(algo.num_sets, train.num_generations) * train.num_generations
    return max_draws(train) * (40 * train.num_generations * max_sequence_tokens(config) + FLOAT32_BYTES * cells)


def _resident(config: Config, model_config: ModelConfig, machine: Machine) -> dict[str, int]:
    """Returns the bytes that a device always holds. Norms and biases, less than 0.1% of the weights, are omitted."""
    parameters = flops.weights_per_device(model_config, machine.mesh) * bytes_of(model_config.param_dtype)
    trained = flops.trained_elements(config, model_config, machine.mesh)
    moments = trained * (bytes_of(config.optimizer.first_moment_dtype) + FLOAT32_BYTES)
    adapter = {"adapter": trained * FLOAT32_BYTES} if model_config.lora_targets else {}
    reference = {"reference policy": adapter.get("adapter", parameters)} if config.algo.kl_coef else {}
    return {"parameters": parameters} | adapter | {"optimizer moments": moments} | reference


def _process_overhead(update: Mapping[str, Mapping[str, int]], machine: Machine) -> dict[str, int]:
    """Returns the bytes that a CPU process needs in addition to the arrays, for all its devices.

    A compiled program for CPUs allocates all its temporary memory as one block. malloc keeps the block after it is
    freed, but reuses parts of it for other allocations. When the program runs again, the block is no longer available
    as a whole, and malloc requests another block from the system. The memory of each program is therefore counted
    twice.

    Args:
      update: Bytes of the stages of the update, by stage and term.
      machine: The machine.
    """
    blocks = sum(sum(terms.values()) - terms["sum of gradients"] for terms in update.values())
    return {
        "malloc fragmentation": blocks * machine.num_devices,
        "Python, libraries and compiled programs": PROCESS_BYTES,
    }


def _optimizer(config: Config, model_config: ModelConfig, machine: Machine) -> dict[str, int]:
    """Plans the optimizer: the sum of gradients, and on a CPU the updates. Weights and moments are updated in place.

    On a CPU, all updates exist before they are added, because their norm is computed. Accelerators compute the norm
    without storing the updates.
    """
    trained = flops.trained_elements(config, model_config, machine.mesh)
    updates = {"updates": trained * FLOAT32_BYTES} if machine.platform == "cpu" else {}
    return {"sum of gradients": trained * FLOAT32_BYTES} | updates


def _generate(config: Config, model_config: ModelConfig, machine: Machine, cache_growth: float) -> dict[str, int]:
    """Plans generation: gathered weights, caches of the slots and of the prompts, and logits.

    Each process generates its share of the prompts on its own devices. The caches of the slots are counted at full
    length, times `cache_growth`, because growing a cache copies it.
    """
    processes, machine = machine.processes, machine.host
    train, shards, held_out = config.train, row_shards(machine.mesh), config.eval
    requests = -(-train.prompts_per_batch // processes) * train.num_generations
    if held_out.every:
        requests = max(requests, -(-held_out.num_problems // processes) * held_out.num_generations)
    slots = -(-min(config.rollouts.max_concurrent, requests) // shards)  # per device
    prompts = -(-max(1, slots * shards // train.num_generations) // shards)
    value_bytes, tensor = bytes_of(model_config.dtype), machine.mesh["tensor"]
    prompt_length = 1 << (train.max_prompt_tokens - 1).bit_length()
    slot = flops.cache_bytes(model_config, max_sequence_tokens(config), value_bytes) // tensor
    prompt = flops.cache_bytes(model_config, prompt_length, value_bytes) // tensor
    is_gathered = machine.mesh["fsdp"] * machine.mesh["expert"] > 1
    gathered = is_gathered * flops.weights_per_device(model_config, machine.mesh, ("fsdp", "expert")) * value_bytes
    return {
        "gathered weights": gathered,
        "keys and values": int(cache_growth * slots * slot),
        "keys and values of prompts": prompts * prompt,
        "logits": 3 * slots * model_config.vocab_size * FLOAT32_BYTES,
    }
