"""Prints memory plans as tables."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from poly_epo_jax.config.keys import Config, ConfigError, MeshSection
from poly_epo_jax.memory_plan.plan import Plan, plan_of
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.parallel.mesh import shown_axes
from poly_epo_jax.step.packing import row_tokens

BRIEF_FRACTION = 0.1  # plans that need less than this fraction of the memory are printed without a table
MIN_TERM_FRACTION = 0.01  # terms below this fraction of the bytes of a stage are not printed


def print_plan(plan: Plan, rows_that_fit: int, console: Console, brief: bool = False) -> dict[str, Any]:
    """Prints a table of the stages and a summary, with a warning if the plan does not fit.

    Args:
      plan: Memory plan, from `plan_of`.
      rows_that_fit: Maximum number of rows per device that fit, from `plan_of`.
      console: Console to print to.
      brief: Whether to omit the table if the plan needs less than `BRIEF_FRACTION` of the memory.

    Returns:
      The plan as JSON-serializable values, see `as_row`.
    """
    table = Table(
        "stage", Column("memory per device", justify="right", no_wrap=True), "largest terms", box=box.SIMPLE_HEAD
    )
    for stage, stage_terms in plan.stages.items():
        total = plan.stage_bytes(stage)
        terms = sorted([*plan.resident.items(), *stage_terms.items()], key=lambda term: -term[1])
        shown = [f"{name} {amount(size)}" for name, size in terms if size >= MIN_TERM_FRACTION * total]
        table.add_row(stage, amount(total), ", ".join(shown))
    if plan.process_overhead:
        shown = [f"{name} {amount(size)}" for name, size in plan.process_overhead.items()]
        table.add_row(
            "process overhead", amount(sum(plan.process_overhead.values())), f"{', '.join(shown)}, for all devices"
        )
    if not (brief and plan.memory_bytes and plan.needed_bytes < BRIEF_FRACTION * plan.memory_bytes):
        console.print(table)
    axes = ", ".join(f"{axis} {size}" for axis, size in shown_axes(plan.machine.mesh).items())
    limit = f" of {amount(plan.memory_bytes)}" if plan.memory_bytes else ""
    hint = (
        f"; train.rows_per_device={rows_that_fit} would fit" if rows_that_fit not in (0, plan.rows_per_device) else ""
    )
    console.print(
        f"Plan: {plan.machine.num_devices} x {plan.machine.device or 'unknown'}, mesh {axes}, "
        f"model.remat={plan.remat}, train.rows_per_device={plan.rows_per_device} of {plan.row_tokens:,} tokens: "
        f"{amount(plan.needed_bytes)}{limit} on each device{hint}.",
        soft_wrap=True,
    )
    if not plan.fits:
        console.print(
            f"Warning: a device needs {amount(plan.needed_bytes, 4)} according to this plan, but JAX may use only "
            f"{amount(plan.memory_bytes or 0, 4)}; {remedy(plan, rows_that_fit)}.",
            soft_wrap=True,
            style="bold yellow",
        )
    return as_row(plan, rows_that_fit)


def print_plans(
    config: Config, model_config: ModelConfig, meshes: Mapping[str, Mapping[str, Any]], console: Console
) -> dict[str, Any]:
    """Prints a table of the plans of a configuration on several meshes.

    Args:
      config: The configuration. Its `mesh` section is replaced.
      model_config: The model configuration. If its `remat` is "auto", it is chosen for each mesh.
      meshes: Meshes by name, as in `config.machines.MESHES`. For a mesh that does not fit the model, the error is
        printed instead.
      console: Console to print to.

    Returns:
      The plans by name of the mesh, see `as_row`.
    """
    columns = (
        Column(name, justify="right" if name in ("hosts", "state", "peak", "limit", "rows") else "left", no_wrap=True)
        for name in ("mesh", "hosts", "device", "axes", "state", "peak", "limit", "stage", "remat", "rows")
    )
    table, found = Table(*columns, box=box.SIMPLE_HEAD), {}
    for name, mesh in meshes.items():
        axes = {key: value for key, value in mesh.items() if key in config.mesh}
        try:
            plan, rows_that_fit = plan_of(dataclasses.replace(config, mesh=MeshSection(**axes)), model_config)
        except ConfigError as error:
            console.print(f"{name}: {error}", soft_wrap=True)
            continue
        found[name] = as_row(plan, rows_that_fit)
        table.add_row(
            name,
            str(mesh["processes"]),
            f"{mesh['num_devices']} x {mesh['device_kind']}",
            " x ".join(map(str, shown_axes(plan.machine.mesh).values())),
            amount(sum(plan.resident.values())),
            amount(plan.needed_bytes),
            amount(plan.memory_bytes or 0),
            plan.peak_stage,
            plan.remat,
            str(rows_that_fit),
        )
    console.print(table)
    console.print(
        "axes: data x fsdp x tensor, and x expert if it is above 1. state: parameters and optimizer moments on each "
        f"device. peak: maximum memory of a device, with train.rows_per_device={config.train.rows_per_device}, reached "
        "in the given stage. limit: memory that JAX may use. rows: largest train.rows_per_device that fits with this "
        f"remat and that a minibatch can fill, with rows of {row_tokens(config):,} tokens (0 = not even one row fits)."
    )
    return found


def as_row(plan: Plan, rows_that_fit: int) -> dict[str, Any]:
    """Converts a plan to JSON-serializable values.

    Args:
      plan: Memory plan, from `plan_of`.
      rows_that_fit: Maximum number of rows per device that fit, from `plan_of`.
    """
    return {
        "device": plan.machine.device,
        "mesh": dict(plan.machine.mesh),
        "rows_per_device": plan.rows_per_device,
        "row_tokens": plan.row_tokens,
        "remat": plan.remat,
        "resident": dict(plan.resident),
        "stages": {name: dict(terms) for name, terms in plan.stages.items()},
        "peak_stage": plan.peak_stage,
        "peak_bytes": plan.peak_bytes,
        "process_overhead": dict(plan.process_overhead),
        "needed_bytes": plan.needed_bytes,
        "memory_bytes": plan.memory_bytes,
        "max_rows_per_device": rows_that_fit,
    }


def remedy(plan: Plan, rows_that_fit: int) -> str:
    """Returns the remedy for a plan that does not fit. More CPU devices would not add memory.

    Args:
      plan: Memory plan, from `plan_of`.
      rows_that_fit: Maximum number of rows per device that fit, from `plan_of`.
    """
    less = {
        "gradient": f"set train.rows_per_device={rows_that_fit}" if rows_that_fit else "lower train.row_tokens",
        "generate": "lower rollouts.max_concurrent or sampling.max_tokens",
    }.get(plan.peak_stage)
    more = "use a machine or container with more memory" if plan.machine.platform == "cpu" else "use more devices"
    return f"{less}, or {more}" if less else more


def amount(size: int, digits: int = 3) -> str:
    """Formats a number of bytes in GB or, below 0.1 GB, in MB, with a number of significant digits."""
    return f"{size / 1e9:.{digits}g} GB" if size >= 1e8 else f"{size / 1e6:.{digits}g} MB"
