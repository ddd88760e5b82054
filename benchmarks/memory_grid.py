"""Compares memory plans with programs that are compiled for GPUs and TPUs: python benchmarks/memory_grid.py

Compiles the gradient program of each point, which determines the peak of an update, with all layers of the model, in a
separate process. The bytes of its buffers are appended to memory_grid.jsonl. Points that this file contains are not
compiled again: delete the file to compile all of them, for example after an upgrade of JAX. Then run
docs/hardware_table.py. Requires both environments of launch/compiler_env.sh. A point takes 10 to 40 CPU seconds.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from poly_epo_jax.bench.aot.topology import preset_devices
from poly_epo_jax.config.keys import Config
from poly_epo_jax.config.machines import MESHES
from poly_epo_jax.memory_plan.plan import Plan, machine_of, make_plan
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.hf import read_model_config
from poly_epo_jax.model.lora import lora_fields
from poly_epo_jax.model.presets import PRESETS, preset_config
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.startup.command_line import read_arguments
from poly_epo_jax.step.packing import microbatch_rows
from poly_epo_jax.step.update import make_update

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_suffix(".jsonl")

FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma-3-1B": {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32_768,
    },
    "Llama-3.2-1B": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    "Qwen3.5-0.8B": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}
"""Content of config.json of models that are not in PRESETS."""


class Point(NamedTuple):
    """A point of the grid.

    Attributes:
      machine: Key of MESHES.
      model: Key of PRESETS or FAMILIES.
      remat: Value of `model.remat`.
      rows: Rows per device.
      row_tokens: Tokens per row.
      rank: Rank of the adapter. If 0, all weights are trained.
      mesh: Sizes of the axes fsdp, tensor and expert. If empty, the sizes of the machine.
    """

    machine: str
    model: str
    remat: str
    rows: int
    row_tokens: int
    rank: int = 0
    mesh: tuple[int, ...] = ()

    def config(self) -> Config:
        """Returns the configuration of the run."""
        keys = [f"train.rows_per_device={self.rows}", f"train.row_tokens={self.row_tokens}", f"lora.rank={self.rank}"]
        if self.rank:
            keys.append("model.param_dtype=bfloat16")
            if "A3B" in self.model:
                keys.append("lora.targets=('q_proj','k_proj','v_proj','o_proj')")  # Experts have no adapters.
        if self.mesh:
            keys += [f"mesh.{axis}={size}" for axis, size in zip(("fsdp", "tensor", "expert"), self.mesh, strict=False)]
            keys.append("mesh.data=-1")
        recipe = f"--config={ROOT}/configs/gsm8k.py:{self.machine}"
        return read_arguments([recipe, *(f"--config.{key}" for key in keys)])

    def model_config(self, config: Config, num_layers: int = 0) -> ModelConfig:
        """Returns the configuration of the model, with all its layers if `num_layers` is 0."""
        options = config.model.compute_options | lora_fields(config.lora) | {"remat": self.remat}
        if self.model in PRESETS:
            found = preset_config(self.model, **options)
        else:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "config.json").write_text(json.dumps(FAMILIES[self.model]))
                found = read_model_config(folder, **options)
        return dataclasses.replace(found, num_layers=num_layers or found.num_layers)

    def plan(self, num_layers: int = 0) -> Plan:
        """Returns the memory plan, for all layers of the model if `num_layers` is 0."""
        config = self.config()
        return make_plan(config, self.model_config(config, num_layers), *machine_of(config))


POINTS = (
    Point("h100x1", "Qwen3-0.6B", "none", 1, 4096),
    Point("h100x1", "Qwen3-0.6B", "dots", 4, 4096),
    Point("h100x1", "Qwen3-0.6B", "full", 8, 4096),
    Point("h100x1", "Qwen3-0.6B", "full", 24, 4096),
    Point("h100x1", "Qwen3-1.7B", "none", 2, 4096),
    Point("h100x1", "Qwen3-1.7B", "attention", 4, 4096),
    Point("h100x1", "Qwen3-4B", "none", 1, 4096, rank=16),
    Point("h100x1", "Qwen3-4B", "dots", 1, 8192, rank=16),
    Point("h100x8", "Qwen3-4B", "none", 1, 8192),
    Point("h100x8", "Qwen3-4B", "full", 1, 16_384, mesh=(4, 1, 1)),
    Point("h100x1", "Llama-3.2-1B", "none", 2, 4096),
    Point("h100x1", "Gemma-3-1B", "dots", 1, 4096),
    Point("h100x1", "Gemma-3-1B", "none", 1, 4096),
    Point("h100x1", "Qwen3.5-0.8B", "full", 1, 4096),
    Point("h100x1", "Qwen3.5-0.8B", "none", 1, 4096),
    Point("h100x8", "Qwen3-30B-A3B", "full", 1, 4096, mesh=(1, 1, 8)),
    Point("h100x8", "Qwen3-30B-A3B", "none", 1, 2048, rank=16),
    Point("v5p-8", "Qwen3-0.6B", "none", 1, 4096),
    Point("v5p-8", "Qwen3-0.6B", "full", 16, 4096),
    Point("v5p-8", "Qwen3-1.7B", "dots", 2, 4096, mesh=(2, 2, 1)),
    Point("v5p-8", "Qwen3-4B", "full", 1, 16_384),
    Point("v5p-8", "Qwen3-4B", "none", 1, 4096, rank=16),
    Point("v5p-8", "Gemma-3-1B", "dots", 1, 4096),
    Point("v5p-8", "Qwen3.5-0.8B", "full", 1, 4096),
    Point("v5p-8", "Qwen3-30B-A3B", "full", 1, 4096, mesh=(1, 1, 4)),
)


def compile_point(point: Point, num_layers: int) -> None:
    """Compiles the gradient of a point. If `num_layers` is 0, it has all layers of the model."""
    config = point.config()
    model_config = point.model_config(config, num_layers)
    mesh = make_mesh(**config.mesh, available=preset_devices(MESHES[point.machine]))
    update = make_update(config, abstract_model(model_config), mesh)
    update.lower(microbatch_rows(config, mesh.shape), point.row_tokens)["gradient"].compile()


def program_bytes(index: int, num_layers: int = 0) -> dict[str, Any]:
    """Compiles the gradient of a point in a child process, with the environment of its machine.

    The child process is killed when the compiler has assigned the buffers, because generating the code for a TPU
    takes ten times as long.

    Args:
      index: Index of the point.
      num_layers: Number of layers. If 0, all layers of the model.

    Returns:
      The bytes of all buffers of the program on one device, and the version of JAX.

    Raises:
      RuntimeError: If the compiler fails.
    """
    kind = "gpu" if POINTS[index].machine.startswith("h100") else "tpu"
    # Variables of other programs, such as flags for CPUs, must not change the compiled programs.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "JAX_", "LIBTPU_"))}
    with tempfile.TemporaryDirectory() as folder:
        environment["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_module_re=.*_add_gradient.*"
        command = [ROOT / f".venv-{kind}" / "bin" / "python", __file__, str(index), str(num_layers)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout
            version = child.stdout.readline().strip()
            while not (found := _reported_bytes(Path(folder))):
                if child.poll() is not None and not (found := _reported_bytes(Path(folder))):
                    raise RuntimeError(f"{POINTS[index]} was not compiled; see the error message above.")
                time.sleep(1)
            child.kill()
    return {"bytes": found, "jax": version}


def _reported_bytes(folder: Path) -> int:
    """Returns the bytes of the buffers in device memory according to the compiler's report, or 0 without a report."""
    text = "".join(path.read_text() for path in folder.glob("*memory-usage-report.txt"))
    found = re.match(r"Memory Space: default \(color=0\)\nTotal bytes: (\d+) ", text)
    return int(found[1]) if found else 0


def found() -> dict[Point, dict[str, Any]]:
    """Returns the results of the points that have been compiled."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    return {Point(**(row["point"] | {"mesh": tuple(row["point"]["mesh"])})): row for row in rows}


def held_bytes(plan: Plan, compiled: Mapping[str, Any]) -> int:
    """Returns the bytes that a device holds during the program, which does not contain the optimizer moments.

    Args:
      plan: Plan of the point.
      compiled: Result of `program_bytes`.
    """
    return compiled["bytes"] + plan.resident["optimizer moments"]


def table() -> Iterator[str]:
    """Yields the lines of the table, in Markdown."""
    columns = ("device", "model", "trained", "remat", "rows", "mesh", "compiled, GB", "planned, GB")
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for point, compiled in found().items():
        plan, trained = point.plan(), "LoRA" if point.rank else "all"
        rows = f"{point.rows} x {point.row_tokens:,}"
        mesh = ", ".join(f"{axis} {size}" for axis, size in plan.machine.mesh.items() if size > 1)
        held, planned = held_bytes(plan, compiled), plan.stage_bytes("gradient")
        sizes = f"{held / 1e9:.1f} | {planned / 1e9:.1f}"
        yield f"| {plan.machine.device} | {point.model} | {trained} | {point.remat} | {rows} | {mesh} | {sizes} |"


def main() -> None:
    """Compiles the missing points, or in a child process one point, and prints the table."""
    if len(sys.argv) > 1:
        print(jax.__version__, flush=True)
        compile_point(POINTS[int(sys.argv[1])], int(sys.argv[2]))
        return
    for index, point in enumerate(POINTS):
        if point not in found():
            row = {"point": point._asdict()} | program_bytes(index)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print("\n".join(table()))


if __name__ == "__main__":
    main()
