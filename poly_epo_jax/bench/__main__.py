"""How fast each stage of a training step is, and how near its roofline, for a configuration's model, mesh and batch.

python -m poly_epo_jax.bench --config=configs/polynomial.py --config.mesh.fsdp=1 --output=runs/bench.json
python -m poly_epo_jax.bench --config=configs/polaris.py:v5p-16 --plan        only the memory it needs, on any machine
python -m poly_epo_jax.bench --config=configs/polaris.py --compile-for=v5p-16    what its programs hold and do there

Weights and tokens are random, so the model need not be here: Qwen3 models are known by name (model/presets.py). Run it
again after changing the mesh, the rows per device or model.remat, and compare.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags
from rich.console import Console

from poly_epo_jax.bench.aot.command import compile_for
from poly_epo_jax.bench.console import console_table, wide_console, write_figures
from poly_epo_jax.bench.roofline import measure_roofline
from poly_epo_jax.bench.stages import stage_row, time_stages
from poly_epo_jax.bench.workload import make_workload
from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.config.machines import MESHES
from poly_epo_jax.memory_plan.tables import plan_of, print_plan, print_plans
from poly_epo_jax.model.attention.self_check import CHECKED, trust_attention
from poly_epo_jax.parallel.mesh import check_mesh
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.startup.command_line import parse_flags, run_command
from poly_epo_jax.startup.prepare import check_memory, check_writable, model_shape
from poly_epo_jax.step.packing import row_tokens

PLAN = flags.DEFINE_bool("plan", False, "Only plans the memory of each device; needs none of the devices.")
PLANS = flags.DEFINE_bool("plans", False, "The same for every mesh of poly_epo_jax/config/machines.py.")
COMPILE_FOR = flags.DEFINE_string(
    "compile-for", "", "Only compiles, for a machine of poly_epo_jax/config/machines.py that need not be here."
)
LAYERS = flags.DEFINE_integer("layers", 0, "Of the model, with --compile-for; 0: all.", lower_bound=0)
OUTPUT = flags.DEFINE_string("output", "", "Where the figures are written; empty: in runs, bench.json and the like.")


def run(config: Config, output: Path) -> None:
    """Times the stages, shows them in a table and writes them to `output`.

    Raises:
      ValueError, OSError: the configuration cannot run; the message says why and what to do.
    """
    if config.hosts.coordinator:
        raise ConfigError(
            f"hosts.coordinator={config.hosts.coordinator}, but bench times one host; leave it out, and see a run's "
            "timing.jsonl for several."
        )
    mesh = make_mesh(**config.mesh)
    shape = model_shape(config)
    check_mesh(config.mesh, mesh.shape, dataclasses.asdict(shape), row_tokens(config))
    check_memory(config, *plan_of(config, shape))
    trust_attention(config.model.attention, shape, mesh, Path(config.compilation_cache) / CHECKED)
    console = wide_console()
    with console.status("measuring the peak rates of the device"):
        roofline = measure_roofline(config.model.dtype)
    workload = make_workload(config, shape.vocab_size, mesh.shape)
    stages = []
    with console.status("") as status:
        status.update("generate, or compiling the update")
        for stage in time_stages(config, shape, mesh, workload):
            stages.append(stage)
            status.update(f"after {stage.name}")
    rows = [stage_row(stage, roofline, mesh.size) for stage in stages]
    setting = {
        "device": jax.devices()[0].device_kind,
        "mesh": dict(mesh.shape),
        "dtype": config.model.dtype,
        "sequences": len(workload.prompt_lengths),
        "tokens": int((workload.prompt_lengths + workload.response_lengths).sum()),
        "microbatch_tokens": workload.minibatches[0][0].tokens.size,
        "pad_share": workload.pad_share,
        "device_tflops": roofline.flops_per_second / 1e12,
        "device_gb_per_second": roofline.bytes_per_second / 1e9,
    }
    _show(console, setting, rows)
    write_figures(output, {"setting": setting, "stages": rows}, console)


def plan(config: Config, output: Path, every_mesh: bool) -> None:
    """Shows how much memory each device needs, and writes the figures to `output`.

    Raises:
      ValueError, OSError: the configuration cannot run; the message says why and what to do.
    """
    shape, console = model_shape(config), wide_console()
    found = print_plans(config, shape, MESHES, console) if every_mesh else print_plan(*plan_of(config, shape), console)
    write_figures(output, found, console)


def _show(console: Console, setting: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    total = sum(row["seconds"] for row in rows)
    mesh = " x ".join(f"{axis} {size}" for axis, size in setting["mesh"].items())
    console.print(f"{setting['device']}, mesh {mesh}, {setting['dtype']}")
    console.print(
        f"{setting['sequences']:,} sequences, {setting['tokens']:,} tokens, in microbatches of "
        f"{setting['microbatch_tokens']:,} ({setting['pad_share']:.1%} padding)"
    )
    figures = ("s/step", "share", "roofline s", "tokens/s", "matmul", "GB", "compile s")
    table = console_table(("stage", "bound by"), figures)
    for row in rows:
        table.add_row(
            row["name"],
            row["bound"],
            f"{row['seconds']:.3g}",
            f"{row['seconds'] / total:.0%}",
            f"{row['roofline_seconds']:.2g}",
            f"{row['tokens_per_second']:,.0f}" if row["tokens"] else "",
            f"{row['share_of_matmul_peak']:.0%}" if row["flops"] else "",
            f"{row['device_bytes'] / 1e9:.2f}",
            f"{row['compile_seconds']:.1f}",
        )
    console.print(table)
    console.print(
        f"One device multiplies at {setting['device_tflops']:.3g} TFLOP/s and moves "
        f"{setting['device_gb_per_second']:.3g} GB/s, both measured now. matmul: share of the former, without "
        "recomputation. roofline: the seconds that the stage's FLOPs or bytes take at these rates. GB: of one device. "
        "Rollout and judge servers are timed by a run itself: see its timeline."
    )


def _run_or_plan(config: Config) -> None:
    plans = PLAN.value or PLANS.value
    name = "plan" if plans else f"compiled-{COMPILE_FOR.value}" if COMPILE_FOR.value else "bench"
    output = Path(OUTPUT.value or f"runs/{name}.json")
    check_writable("--output", output.parent)
    if output.is_dir():
        raise ConfigError(f"--output={output} is a folder; name a file.")
    if plans:
        plan(config, output, PLANS.value)
    elif COMPILE_FOR.value:
        compile_for(config, COMPILE_FOR.value, LAYERS.value, output, wide_console())
    else:
        run(config, output)


def main(argv: Sequence[str]) -> None:
    run_command(_run_or_plan, argv)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
