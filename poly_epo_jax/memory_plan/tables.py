"""Shows the memory plan for the machine that a configuration names, or else for this one, and returns its figures."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from poly_epo_jax.config.keys import Config, ConfigError, MeshSection
from poly_epo_jax.memory_plan.plan import Plan, largest_rows, make_plan
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.parallel.devices import DEVICES, Setting, device_name
from poly_epo_jax.parallel.mesh import check_mesh, fill_mesh
from poly_epo_jax.step.packing import row_tokens

BRIEF_SHARE = 0.1  # of the memory; a plan below it needs no table
SMALL_SHARE = 0.01  # of a stage's bytes; terms below it are not shown


def print_plan(plan: Plan, rows_that_fit: int, console: Console, brief: bool = False) -> dict[str, Any]:
    """Prints a line per stage and a summary, with a warning if the plan does not fit.

    Args:
      plan: The plan, from `plan_of`.
      rows_that_fit: Maximum number of rows per device that fit, from `plan_of`.
      console: Console to print to.
      brief: If True, only the summary is printed if the plan needs less than `BRIEF_SHARE` of the memory.

    Returns:
      The plan as JSON-serializable values, see `as_row`.
    """
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("while", "held", "of which, on each device"):
        table.add_column(column, justify="right" if column == "held" else "left", no_wrap=column == "held")
    for stage, own in plan.stages.items():
        total = plan.stage_bytes(stage)
        terms = sorted([*plan.resident.items(), *own.items()], key=lambda term: -term[1])
        shown = [f"{name} {amount(size)}" for name, size in terms if size >= SMALL_SHARE * total]
        table.add_row(stage, amount(total), ", ".join(shown))
    if plan.besides:
        shown = [f"{name} {amount(size)}" for name, size in plan.besides.items()]
        table.add_row("besides", amount(sum(plan.besides.values())), f"{', '.join(shown)}; of the process, in all")
    if not (brief and plan.memory_bytes and plan.needed_bytes < BRIEF_SHARE * plan.memory_bytes):
        console.print(table)
    axes = ", ".join(f"{axis} {size}" for axis, size in plan.setting.mesh.items())
    limit = f" of {amount(plan.memory_bytes)}" if plan.memory_bytes else ""
    hint = f"; train.rows_per_device={rows_that_fit} would fit" if rows_that_fit else ""
    console.print(
        f"Plan: {plan.setting.num_devices} x {plan.setting.device or 'unknown'}, mesh {axes}, "
        f"model.remat={plan.remat}, train.rows_per_device={plan.rows_per_device} of {plan.row_tokens:,} tokens: "
        f"{amount(plan.needed_bytes)}{limit} on each device{hint}.",
        soft_wrap=True,
    )
    if not plan.fits:
        lower = "train.rows_per_device" if rows_that_fit else "train.row_tokens"
        advice = f"take more devices, or lower {lower}" if plan.peak_stage == "gradient" else "take more devices"
        console.print(
            f"Warning: by this plan a device needs {amount(plan.needed_bytes)} and JAX may take "
            f"{amount(plan.memory_bytes or 0)}; {advice}.",
            soft_wrap=True,
            style="bold yellow",
        )
    return as_row(plan, rows_that_fit)


def print_plans(
    config: Config, shape: ModelConfig, meshes: Mapping[str, Mapping[str, Any]], console: Console
) -> dict[str, Any]:
    """Shows a table of the plans on these meshes, by name. A mesh that the model cannot be split over is left out."""
    table, found = Table(box=box.SIMPLE_HEAD), {}
    shape = dataclasses.replace(shape, remat=config.model.remat)  # if it is auto, each mesh has its own
    for column in ("mesh", "hosts", "device", "axes", "held", "peak", "of", "while", "remat", "rows"):
        table.add_column(
            column, justify="right" if column in ("hosts", "held", "peak", "of", "rows") else "left", no_wrap=True
        )
    for name, mesh in meshes.items():
        axes = {key: value for key, value in mesh.items() if key in config.mesh}
        try:
            plan, rows_that_fit = plan_of(dataclasses.replace(config, mesh=MeshSection(**axes)), shape)
        except ConfigError as error:
            console.print(f"{name}: {error}", soft_wrap=True)
            continue
        found[name] = as_row(plan, rows_that_fit)
        table.add_row(
            name,
            str(mesh["processes"]),
            f"{mesh['devices']} x {mesh['device']}",
            " x ".join(map(str, plan.setting.mesh.values())),
            amount(sum(plan.resident.values())),
            amount(plan.needed_bytes),
            amount(plan.memory_bytes or 0),
            plan.peak_stage,
            plan.remat,
            str(rows_that_fit),
        )
    console.print(table)
    console.print(
        "axes: data x fsdp x tensor. held: parameters and moments, always on each device. peak: with "
        f"train.rows_per_device={config.train.rows_per_device}. rows: the largest train.rows_per_device that fits and "
        f"that a minibatch can fill, of {row_tokens(config):,} tokens; 0: not even one row fits."
    )
    return found


def as_row(plan: Plan, rows_that_fit: int) -> dict[str, Any]:
    """The plan's figures, ready for JSON."""
    return {
        "device": plan.setting.device,
        "mesh": dict(plan.setting.mesh),
        "rows_per_device": plan.rows_per_device,
        "row_tokens": plan.row_tokens,
        "remat": plan.remat,
        "resident": dict(plan.resident),
        "stages": {name: dict(terms) for name, terms in plan.stages.items()},
        "peak_stage": plan.peak_stage,
        "peak_bytes": plan.peak_bytes,
        "besides": dict(plan.besides),
        "needed_bytes": plan.needed_bytes,
        "memory_bytes": plan.memory_bytes,
        "largest_rows_per_device": rows_that_fit,
    }


def plan_of(config: Config, shape: ModelConfig) -> tuple[Plan, int]:
    """The plan for the configuration's machine, or else for this one, and the most rows per device that fit.

    Raises:
      ConfigError: the mesh does not fit the devices or the model.
    """
    setting, memory_bytes = setting_of(config)
    check_mesh(config.mesh, setting.mesh, dataclasses.asdict(shape), row_tokens(config))
    plan = make_plan(config, shape, setting, memory_bytes)
    return plan, largest_rows(config, shape, setting, memory_bytes)


def setting_of(config: Config) -> tuple[Setting, int | None]:
    """The machine that config.mesh describes, and the bytes of a device that JAX may use, None if not known.

    This machine's devices are queried only for what config.mesh leaves open.

    Raises:
      ConfigError: the devices cannot be arranged into that mesh.
    """
    mesh = config.mesh
    here = [] if mesh.device and mesh.devices else jax.devices()
    device = mesh.device or device_name(here[0].device_kind)
    setting = Setting(device, fill_mesh(mesh, mesh.devices or len(here)))
    if here and (limit := (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")):
        return setting, limit
    if device == "cpu":  # all its devices share one memory
        return setting, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // setting.num_devices
    if not device:
        return setting, None
    share = DEVICES[device].jax_share
    if share < 1:
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", share))
    return setting, int(share * (DEVICES[device].memory_bytes or 0))


def amount(size: int) -> str:
    """A size in GB, or in MB for tiny policies."""
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
