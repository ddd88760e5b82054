"""Measures the stages of a training step with the model, mesh and batch of a configuration, and their rooflines.

python -m poly_epo_jax.bench --config=configs/polynomial.py --config.mesh.fsdp=1 --output=runs/bench.json
python -m poly_epo_jax.bench --config=configs/polynomial.py --stages=gradient    only measures these stages
python -m poly_epo_jax.bench --config=configs/polaris.py:v5p-16 --plan           only plans the memory, on any machine
python -m poly_epo_jax.bench --config=configs/polaris.py --compile_for=v5p-16    only compiles programs for a machine

Weights and tokens are random, so the model is not downloaded. The configurations of Qwen3 models are built in
(model/presets.py). To compare meshes, rows per device or values of model.remat, run the command with each of them.
The results are written after each stage, so that a command that is terminated leaves the finished stages.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from poly_epo_jax.bench.aot.command import compile_for
from poly_epo_jax.bench.console import console_table, wide_console, write_figures
from poly_epo_jax.bench.roofline import Roofline, measure_roofline
from poly_epo_jax.bench.stages import stage_names, stage_row, time_stages
from poly_epo_jax.bench.workload import Workload, make_workload
from poly_epo_jax.config.checks import validate
from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.config.machines import MESHES
from poly_epo_jax.memory_plan.plan import plan_of
from poly_epo_jax.memory_plan.tables import as_row, print_plan, print_plans
from poly_epo_jax.model.attention.self_check import CHECKED, verify_attention_kernel
from poly_epo_jax.parallel.devices import DEVICES, Device, device_name, device_peak
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.registry import Range
from poly_epo_jax.startup.command_line import config_parser, run_command
from poly_epo_jax.startup.prepare import check_memory, check_writable, configure_compiler, configured_shape, model_shape
from poly_epo_jax.system.json_files import write_json
from poly_epo_jax.system.output_folder import user_path


def run(config: Config, output: Path, names: Sequence[str]) -> None:
    """Measures the stages, prints them as a table, and writes them to a file.

    The file is replaced after each stage. `peak_bytes` of a stage is the peak memory of a device since the start of the
    process. It is the peak of the stage itself if it exceeds the peak of the stage before it; otherwise, measure the
    stage alone.

    Args:
      config: Configuration of the run.
      output: JSON file to which the results are written.
      names: Stages to measure, of `stage_names`.

    Raises:
      ValueError: If the configuration is not valid on this machine.
      OSError: If the model configuration cannot be read, or `output` cannot be written.
    """
    if config.hosts.coordinator_address:
        raise ConfigError(
            f"hosts.coordinator_address={config.hosts.coordinator_address} is not supported, because bench measures "
            "one process; omit it. For multi-process runs, see the run's timing.jsonl."
        )
    mesh, model_config = make_mesh(**config.mesh), model_shape(config)
    memory_plan, rows_that_fit = plan_of(config, model_config)
    check_memory(config, memory_plan, rows_that_fit)
    configure_compiler(config)
    verify_attention_kernel(config.model.attention, model_config, mesh, Path(config.compilation_cache_dir) / CHECKED)
    console = wide_console()
    with console.status("measuring the peak rates of the device"):
        roofline = measure_roofline(config.model.dtype)
    workload = make_workload(config, model_config.vocab_size, mesh.shape)
    vendor = DEVICES.get(device_name(jax.devices()[0].device_kind), DEVICES["cpu"])  # The rates of CPUs are None.
    setting, rows = _setting(config, mesh, workload, roofline, vendor), list[dict[str, Any]]()
    figures = {"setting": setting, "plan": as_row(memory_plan, rows_that_fit), "stages": rows}
    write_json(output, figures)
    with console.status(f"measuring {names[0]}") as status:
        for stage in time_stages(config, model_config, mesh, workload, names):
            rows.append(
                stage_row(stage, roofline, mesh.size)
                | {
                    "mfu": vendor.flops_per_second
                    and stage.flops / (stage.seconds * vendor.flops_per_second * mesh.size),
                    "planned_bytes": memory_plan.stage_bytes(stage.name) if stage.name in memory_plan.stages else None,
                    "peak_bytes": device_peak(),
                }
            )
            write_json(output, figures)
            status.update(f"finished {stage.name}")
    _show(console, setting, rows)
    console.print(f"Written to {output}.")


def _setting(config: Config, mesh: Mesh, workload: Workload, roofline: Roofline, vendor: Device) -> dict[str, Any]:
    return {
        "device": jax.devices()[0].device_kind,
        "mesh": dict(mesh.shape),
        "dtype": config.model.dtype,
        "sequences": len(workload.prompt_lengths),
        "tokens": int((workload.prompt_lengths + workload.response_lengths).sum()),
        "microbatch_tokens": workload.minibatches[0][0].tokens.size,
        "pad_share": workload.pad_share,
        "device_tflops": roofline.flops_per_second / 1e12,
        "device_gb_per_second": roofline.bytes_per_second / 1e9,
        "vendor_tflops": vendor.flops_per_second and vendor.flops_per_second / 1e12,
        "vendor_gb_per_second": vendor.bytes_per_second and vendor.bytes_per_second / 1e9,
    }


def plan(config: Config, output: Path, every_mesh: bool) -> None:
    """Prints the memory that each device needs, and writes it to a file.

    Args:
      config: Configuration of the run.
      output: JSON file to which the plan is written.
      every_mesh: Whether to plan for every mesh of config/machines.py instead of the configuration's mesh.

    Raises:
      ValueError: If the configuration is invalid.
      OSError: If the model configuration cannot be read, or `output` cannot be written.
    """
    model_config, console = configured_shape(config), wide_console()
    found = (
        print_plans(config, model_config, MESHES, console)
        if every_mesh
        else print_plan(*plan_of(config, model_config), console)
    )
    write_figures(output, found, console)


def _show(console: Console, setting: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    total = sum(row["seconds"] for row in rows if row["in_step"])
    mesh = " x ".join(f"{axis} {size}" for axis, size in setting["mesh"].items())
    console.print(f"{setting['device']}, mesh {mesh}, {setting['dtype']}")
    console.print(
        f"{setting['sequences']:,} sequences, {setting['tokens']:,} tokens, in microbatches of "
        f"{setting['microbatch_tokens']:,} ({setting['pad_share']:.1%} padding)"
    )
    sizes = {"GB": "device_bytes", "plan": "planned_bytes", "peak": "peak_bytes"}
    table = console_table(
        ("stage", "bottleneck"), ("seconds", "share", "roofline s", "tokens/s", "matmul", "MFU", *sizes, "compile s")
    )
    for row in rows:
        table.add_row(
            row["name"],
            row["bound"],
            f"{row['seconds']:.3g}",
            f"{row['seconds'] / total:.0%}" if row["in_step"] else "",
            f"{row['roofline_seconds']:.2g}",
            f"{row['tokens_per_second']:,.0f}" if row["tokens"] else "",
            f"{row['share_of_matmul_peak']:.0%}" if row["flops"] else "",
            f"{row['mfu']:.0%}" if row["mfu"] else "",
            *("" if row[size] is None else f"{row[size] / 1e9:.2f}" for size in sizes.values()),
            f"{row['compile_seconds']:.1f}",
        )
    console.print(table)
    console.print(
        f"Measured peak rates of one device: {setting['device_tflops']:.3g} TFLOP/s and "
        f"{setting['device_gb_per_second']:.3g} GB/s. matmul: fraction of the peak FLOP/s, without recomputation. MFU: "
        "the same fraction of the vendor's rate for dense bfloat16. roofline s: seconds that the FLOPs or bytes of the "
        "stage take at the peak rates. GB, plan, peak: GB of one device according to the compiled programs and the "
        "memory plan, and measured since the start of the command. Stages without a share are not part of the step. "
        "Rollout and judge servers are not measured; see the timeline of a run."
    )


def _run_or_plan(config: Config, flags: argparse.Namespace) -> None:
    plans, machine = flags.plan or flags.plan_all_meshes, flags.compile_for
    name = "plan" if plans else f"compiled-{machine}" if machine else "bench"
    output = flags.output or Path(f"runs/{name}.json")
    validate(flags.num_layers, "--num_layers", Range(0, 10**6))
    check_writable("--output", output.parent)
    if output.is_dir():
        raise ConfigError(f"--output={output} is a folder; set it to a file.")
    if plans:
        plan(config, output, flags.plan_all_meshes)
    elif machine:
        if config.train.deterministic:
            print("--compile_for omits train.deterministic: some versions of XLA compile such programs only on a GPU.")
        compile_for(config, machine, flags.num_layers, output, wide_console())
    else:
        names = flags.stages.split(",") if flags.stages else stage_names(config)
        if unknown := [name for name in names if name not in stage_names(config)]:
            raise ConfigError(
                f"--stages={flags.stages} contains {unknown[0]!r}, which is not a stage of this configuration; choose "
                f"from {', '.join(stage_names(config))}."
            )
        run(config, output, names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line (`sys.argv` if None) and returns the exit code."""
    parser = config_parser(__doc__)
    parser.add_argument("--stages", default="", metavar="NAMES", help="stages to measure, such as generate,gradient")
    parser.add_argument("--plan", action="store_true", help="only plan the memory of each device, on any machine")
    parser.add_argument(
        "--plan_all_meshes", action="store_true", help="only plan the memory for every mesh of config/machines.py"
    )
    parser.add_argument(
        "--compile_for", default="", metavar="NAME", help="only compile for this machine of machines.py"
    )
    parser.add_argument(
        "--num_layers", type=int, default=0, help="number of layers to compile with --compile_for (0 = all layers)"
    )
    parser.add_argument(
        "--output", type=user_path, metavar="FILE", help="JSON file for the results (default: a file in runs/)"
    )
    return run_command(parser, arguments, _run_or_plan)


if __name__ == "__main__":
    sys.exit(main())
