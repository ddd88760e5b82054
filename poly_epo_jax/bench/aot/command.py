"""Implements bench --compile_for=NAME: compiles a run's programs for a machine, and reports their estimated costs.

Programs are compiled from array shapes. The machine does not need to be available.
"""

import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console

from poly_epo_jax.bench.aot.program_report import ProgramReport
from poly_epo_jax.bench.aot.table import show_programs
from poly_epo_jax.bench.aot.topology import device_rates, preset_devices
from poly_epo_jax.bench.console import write_figures
from poly_epo_jax.config.keys import Config, ConfigError, MeshSection
from poly_epo_jax.config.machines import MESHES
from poly_epo_jax.memory_plan.plan import machine_of, make_plan
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.decoding import decoding_weights
from poly_epo_jax.model.transformer import abstract_model, param_shapes
from poly_epo_jax.parallel.mesh import check_mesh, host_axes
from poly_epo_jax.parallel.sharding import abstract_arrays, make_mesh, param_shardings, replicated
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.rollouts.embedded import programs
from poly_epo_jax.rollouts.embedded.slots import TURNOVER, cache_sizes, capacity
from poly_epo_jax.startup.prepare import model_shape
from poly_epo_jax.step.packing import microbatch_rows, row_tokens, rows_per_device
from poly_epo_jax.step.update import make_update


def compile_for(config: Config, name: str, num_layers: int, output: Path, console: Console) -> dict[str, Any]:
    """Compiles the programs of a configuration for a machine, prints their costs, and writes them to a file.

    Args:
      config: Configuration of the run. If its mesh is for another machine, the default mesh of the machine is used.
      name: Name of the machine, a key of `machines.MESHES`.
      num_layers: Number of layers to compile. 0 compiles all layers of the model.
      output: JSON file to which the results are written.
      console: Console to which the results are printed.

    Returns:
      The results that were written.

    Raises:
      ConfigError: If the machine is unknown, its compiler is not installed, or the mesh is not valid for the model.
      OSError: If the model configuration cannot be read, or `output` cannot be written.
    """
    config, preset = _on_machine(config, name), MESHES[name]
    devices = preset_devices(preset)
    mesh = make_mesh(**config.mesh, available=devices)
    # XLA only compiles for all devices of a topology. Decoding uses the devices of one process, a separate topology.
    host = preset | {"num_devices": len(devices) // preset["processes"], "processes": 1}
    local_mesh = make_mesh(**dict[str, Any](host_axes(mesh.shape, host["num_devices"])), available=preset_devices(host))
    model_config = model_shape(config)
    model_config = dataclasses.replace(model_config, num_layers=num_layers or model_config.num_layers)
    check_mesh(config.mesh, mesh.shape, dataclasses.asdict(model_config), row_tokens(config))
    (machine, memory_bytes), rates = machine_of(config), device_rates(preset, devices)
    report = ProgramReport(config, model_config, mesh, rates, make_plan(config, model_config, machine, memory_bytes))
    start = time.perf_counter()
    with console.status("compiling") as status:
        for program, compiled in _programs(config, model_config, mesh, local_mesh):
            report.add(program, compiled)
            status.update(f"compiling (finished {program})")
    found = {
        "machine": name,
        "mesh": dict(mesh.shape),
        "model": config.model.path or "base",
        "num_layers": model_config.num_layers,
        "remat": model_config.remat,
        "rows_per_device": rows_per_device(config, mesh.shape),
        "row_tokens": row_tokens(config),
        "jax": jax.__version__,
        "compile_seconds": time.perf_counter() - start,
        "rates": dataclasses.asdict(rates),
        "memory_bytes": memory_bytes,
        "programs": report.programs,
        "step": report.step(),
    }
    show_programs(found, console)
    write_figures(output, found, console)
    return found


def _on_machine(config: Config, name: str) -> Config:
    if name not in MESHES:
        raise ConfigError(f"--compile_for={name} is not a known machine; choose one of {', '.join(MESHES)}.")
    preset = MESHES[name]
    if (config.mesh.device_kind, config.mesh.num_devices) == (preset["device_kind"], preset["num_devices"]):
        return config
    return dataclasses.replace(
        config,
        mesh=MeshSection(**{key: preset[key] for key in ("data", "fsdp", "tensor", "device_kind", "num_devices")}),
    )


def _programs(config: Config, model_config: ModelConfig, mesh: Mesh, local_mesh: Mesh) -> Iterator[tuple[str, Any]]:
    yield from compile_update(config, model_config, mesh)
    if SAMPLERS[config.rollouts.name].has_slots:
        yield from compile_decoding(config, model_config, local_mesh)


def compile_update(config: Config, model_config: ModelConfig, mesh: Mesh) -> Iterator[tuple[str, Any]]:
    """Compiles the programs of the update.

    Args:
      config: Configuration of the run.
      model_config: Configuration of the model.
      mesh: Mesh of the run.

    Returns:
      An iterator over (name, compiled program): log-probabilities and gradient of a microbatch, and the optimizer.
    """
    lowered = make_update(config, abstract_model(model_config), mesh).lower(
        microbatch_rows(config, mesh.shape), row_tokens(config)
    )
    return ((name, program.compile()) for name, program in lowered.items())


def compile_decoding(config: Config, model_config: ModelConfig, local_mesh: Mesh) -> Iterator[tuple[str, Any]]:
    """Compiles weight conversion and decoding of the embedded sampler for one process, with the largest cache.

    Args:
      config: Configuration of the run.
      model_config: Configuration of the model.
      local_mesh: Mesh of the devices of one process.

    Yields:
      Pairs (name, compiled program): the conversion of the weights for decoding, and the loop over tokens.
    """
    train, group = config.train, config.train.num_generations
    num_slots, _ = capacity(local_mesh, config.rollouts.max_concurrent, train.prompts_per_batch * group, group)
    size = cache_sizes(train.max_prompt_tokens + config.sampling.max_tokens)[-1]
    with jax.set_mesh(local_mesh):
        model = abstract_model(model_config)
        params = abstract_arrays(param_shapes(model), param_shardings(model, local_mesh))
        push = jax.jit(partial(decoding_weights, model_config)).lower(params)
        compiled = push.compile()
        yield "weights for decoding", compiled
        weights = abstract_arrays(push.out_info, compiled.output_shardings)
        start = programs.start.lower(model_config, num_slots, config.sampling.max_tokens, size)
        state = abstract_arrays(start.out_info, start.compile().output_shardings)
        stop_ids = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=replicated(local_mesh))
        sampling = {name: getattr(config.sampling, name) for name in ("temperature", "top_p", "top_k")}
        yield (
            "decode",
            programs.decode.jitted.lower(
                model_config, weights, state, stop_ids, turnover=max(1, num_slots // TURNOVER), **sampling
            ).compile(),
        )
