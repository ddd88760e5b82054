"""Compiles a run's programs for all GPUs and TPUs: python benchmarks/compiled_machines.py [MACHINE ...]

Runs `bench --compile_for` with two layers of Qwen3-0.6B (configs/gsm8k.py, which also generates) and of Qwen3-4B
(configs/polaris.py) for each machine of machines.py or each of the given machines, and with all layers of Qwen3-4B for
FULL. Results are appended to compiled_machines.jsonl. Programs that this file contains are not compiled again: delete
their lines to compile them again, for example after an upgrade of JAX. Requires both environments of
launch/compiler_env.sh. Two layers take one to four CPU minutes, and all layers up to ten; for v6e, 15 and 20 minutes.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from poly_epo_jax.bench.aot.topology import GPU_SPECS
from poly_epo_jax.config.machines import MESHES

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_suffix(".jsonl")

RECIPES = {"Qwen3-0.6B": "gsm8k", "Qwen3-4B": "polaris"}
FULL = ("v5p-8", "v6e-8", "h200x4", "a100-80x8")
MACHINES = tuple(name for name, mesh in MESHES.items() if mesh["device_kind"] != "cpu")


class Point(NamedTuple):
    """A configuration to compile.

    Attributes:
      machine: Key of MESHES.
      model: Key of RECIPES.
      num_layers: Number of layers, or 0 for all layers of the model.
    """

    machine: str
    model: str
    num_layers: int = 2


POINTS = (
    *(Point(machine, model) for machine in MACHINES for model in RECIPES),
    *(Point(machine, "Qwen3-4B", 0) for machine in FULL),
)


def compile_point(point: Point) -> dict[str, Any]:
    """Compiles the programs of a point in a child process, with the environment of its machine.

    Returns:
      The number of layers, bytes of the gradient program as compiled and as planned, estimated seconds of the gradient
      of a row, MFU of the update, and the version of JAX; or the first line of its error.
    """
    environment = "gpu" if MESHES[point.machine]["device_kind"] in GPU_SPECS else "tpu"
    # Variables of other programs, such as flags for CPUs, must not change the compiled programs.
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "JAX_", "LIBTPU_"))}
    with tempfile.TemporaryDirectory() as folder:
        command = [ROOT / f".venv-{environment}" / "bin" / "python", "-m", "poly_epo_jax.bench"]
        command += [f"--config=configs/{RECIPES[point.model]}.py:{point.machine}", f"--compile_for={point.machine}"]
        command += [f"--num_layers={point.num_layers}", f"--output={folder}/found.json"]
        ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        if ended.returncode:
            errors = re.findall(r"^[\w.]*Error: .*", ended.stderr, re.MULTILINE)
            return {"error": (errors or [f"exit code {ended.returncode}"])[-1][:300]}
        found = json.loads(Path(folder, "found.json").read_text())
    gradient = found["programs"]["gradient"]
    return {
        "layers": found["num_layers"],
        "bytes": gradient["memory"]["total"],
        "planned_bytes": gradient["memory"]["planned"],
        "row_tokens": found["row_tokens"],
        "seconds_per_row": gradient["total_seconds"] / found["rows_per_device"],
        "mfu": found["step"]["update_mfu"],
        "jax": found["jax"],
    }


def found() -> dict[Point, dict[str, Any]]:
    """Returns the results of the points that have been compiled."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    return {Point(**row["point"]): row for row in rows}


def table() -> Iterator[str]:
    """Yields the lines of the table, in Markdown, one for each machine and number of layers."""
    yield f"| machine | {' | '.join(f'{model}: GB, s per row' for model in RECIPES)} |"
    yield "|---" * (1 + len(RECIPES)) + "|"
    results = found()
    lines = dict.fromkeys((point.machine, point.num_layers) for point in filter(results.get, POINTS))
    for machine, num_layers in lines:
        cells = [machine if num_layers else f"{machine}, all layers"]
        for row in (results.get(Point(machine, model, num_layers), {}) for model in RECIPES):
            compiled = f"{row['bytes'] / 1e9:.1f}, {row['seconds_per_row']:#.2g}" if "bytes" in row else ""
            cells.append(compiled or (f"not compiled: {row['error']}" if row else ""))
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Compiles the missing points of the given machines, or of all machines, and prints the table."""
    machines = sys.argv[1:] or MACHINES
    if unknown := set(machines) - set(MACHINES):
        sys.exit(f"Error: {', '.join(unknown)} is not a GPU or TPU machine; choose from {', '.join(MACHINES)}.")
    for point in POINTS:
        if point.machine in machines and point not in found():
            row = {"point": point._asdict()} | compile_point(point)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print("\n".join(table()))


if __name__ == "__main__":
    main()
