"""bench --compile-for=NAME: compiles a run's programs for a machine that need not be here, and shows their figures."""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from poly_epo_jax.bench.aot.figures import Figures
from poly_epo_jax.bench.aot.programs import compile_decoding, compile_update
from poly_epo_jax.bench.aot.table import show
from poly_epo_jax.bench.aot.topology import device_rates, preset_devices
from poly_epo_jax.bench.console import write_figures
from poly_epo_jax.config.keys import Config, ConfigError, MeshSection
from poly_epo_jax.config.machines import MESHES
from poly_epo_jax.memory_plan.plan import make_plan
from poly_epo_jax.memory_plan.tables import setting_of
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.parallel.mesh import check_mesh
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.startup.prepare import model_shape
from poly_epo_jax.step.packing import row_tokens, rows_per_device


def compile_for(config: Config, name: str, num_layers: int, output: Path, console: Console) -> dict[str, Any]:
    """Shows the figures of the configuration's programs on the machine `name`, and writes them to `output`.

    The mesh is the configuration's if it is for this machine, and the machine's own otherwise.

    Args:
      name: a key of machines.MESHES.
      num_layers: how many of the model's layers to compile; 0: all.

    Raises:
      ConfigError: there is no such machine, there is no compiler for it, or the mesh does not fit.
    """
    config = _on_machine(config, name)
    devices = preset_devices(MESHES[name])
    mesh = make_mesh(**config.mesh, available=devices)
    shape = model_shape(config)
    shape = dataclasses.replace(shape, num_layers=num_layers or shape.num_layers)
    check_mesh(config.mesh, mesh.shape, dataclasses.asdict(shape), row_tokens(config))
    (setting, memory_bytes), rates = setting_of(config), device_rates(MESHES[name], devices)
    figures = Figures(config, shape, mesh, rates, make_plan(config, shape, setting, memory_bytes))
    start = time.perf_counter()
    with console.status("compiling") as status:
        for program, compiled in _programs(config, shape, mesh):
            figures.add(program, compiled)
            status.update(f"compiling; {program} is done")
    found = {
        "machine": name,
        "mesh": dict(mesh.shape),
        "model": config.model.path or "base",
        "num_layers": shape.num_layers,
        "remat": shape.remat,
        "rows_per_device": rows_per_device(config, mesh.shape),
        "row_tokens": row_tokens(config),
        "jax": jax.__version__,
        "compile_seconds": time.perf_counter() - start,
        "rates": dataclasses.asdict(rates),
        "memory_bytes": memory_bytes,
        "programs": figures.programs,
        "step": figures.step(),
    }
    show(found, console)
    write_figures(output, found, console)
    return found


def _on_machine(config: Config, name: str) -> Config:
    if name not in MESHES:
        raise ConfigError(f"--compile-for={name} is unknown; choose one of {', '.join(MESHES)}.")
    preset = MESHES[name]
    if (config.mesh.device, config.mesh.devices) == (preset["device"], preset["devices"]):
        return config
    mesh = MeshSection(**{key: preset[key] for key in ("data", "fsdp", "tensor", "device", "devices")})
    return dataclasses.replace(config, mesh=mesh)


def _programs(config: Config, shape: ModelConfig, mesh: jax.sharding.Mesh) -> Iterator[tuple[str, Any]]:
    yield from compile_update(config, shape, mesh)
    if SAMPLERS[config.rollouts.name].has_slots:
        yield from compile_decoding(config, shape, mesh)
