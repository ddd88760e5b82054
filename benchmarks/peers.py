"""Environments, child processes and tables of the three *_peers.py scripts.

The packages of a baseline are pinned in requirements-NAME.txt and installed into env-NAME, next to this file. All child
processes run on the CPU with this repository in PYTHONPATH, and use as many threads as the process has cores.
"""

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = ROOT / "runs" / "bench"
TORCH_FOR_CPU = "https://download.pytorch.org/whl/cpu"
ROUNDS = 3
CONSOLE = Console(highlight=False)

Results = dict[str, dict[str, dict[str, Any]]]
"""Results by case and implementation. Numbers are medians over rounds."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the compared implementations.

    Attributes:
      name: Name of the implementation. The script TASK_NAME.py measures it.
      python: Interpreter that runs the script.
    """

    name: str
    python: Path

    def run(self, task: str, *arguments: str) -> list[dict[str, Any]]:
        """Runs the script of a task, and returns the JSON objects that it prints, one per case.

        Args:
          task: "update", "decode" or "step".
          *arguments: Arguments of the script.

        Raises:
          SystemExit: If the script fails.
        """
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        command = [self.python, HERE / f"{task}_{self.name}.py", *arguments]
        child = subprocess.run(command, env=environment, capture_output=True, text=True)
        if child.returncode:
            raise SystemExit(f"{' '.join(map(str, command))} failed:\n{child.stderr}")
        return [json.loads(line) for line in child.stdout.splitlines() if line.startswith('{"')]


def sides(task: str) -> list[Side]:
    """Returns this package, if it has a script for the task, and the baselines. Creates missing environments."""
    ours = [Side("ours", Path(sys.executable))] if (HERE / f"{task}_ours.py").exists() else []
    if not ours:
        CONSOLE.print(f"[bold]{task}_ours.py does not exist; measuring only the baselines.")
    peers = [name for name in ("transformers", "tunix", "trl") if (HERE / f"{task}_{name}.py").exists()]
    return ours + [Side(name, _environment(name)) for name in peers]


def _environment(name: str) -> Path:
    """Returns the interpreter of a baseline's environment, which is created again if its pinned packages changed."""
    folder, pins = HERE / f"env-{name}", HERE / f"requirements-{name}.txt"
    python = folder / "bin" / "python"
    stamp = folder / f"installed-{hashlib.sha256(pins.read_bytes()).hexdigest()[:16]}"
    if not stamp.exists():
        CONSOLE.print(f"Installing {name} into {folder} (a few minutes) ...")
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # The CPU build of torch has a separate index. The build on PyPI may require CUDA libraries.
        torch = [pin for pin in pins.read_text().split() if pin.startswith("torch==")]
        if torch:
            subprocess.run([*install, "--extra-index-url", TORCH_FOR_CPU, *torch], check=True)
        subprocess.run([*install, "--requirement", pins], check=True)
        stamp.touch()
    return python


def measure(task: str, cases: Sequence[Sequence[str]], folder: str = "") -> Results:
    """Runs the script of each implementation for each case, alternating between implementations, in ROUNDS rounds.

    Args:
      task: "update", "decode" or "step".
      cases: Arguments of the script for each case.
      folder: Folder of the model. If empty, the model of peers_model.py is used.

    Returns:
      The medians over rounds.
    """
    compared = sides(task)
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = folder or f"{scratch}/model"
        if not folder:
            writer = [sys.executable, HERE / "peers_model.py", model]
            subprocess.run(writer, env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}, check=True)
        for number in range(1, ROUNDS + 1):
            for arguments in cases:
                for side in compared:
                    for line in side.run(task, model, *arguments):
                        lines.setdefault((line["case"], side.name), []).append(line)
                        CONSOLE.print(f"round {number}: {line['case']} {side.name} {line['seconds']:.3f} s")
    results: Results = {}
    for (case, side), rounds in lines.items():
        results.setdefault(case, {})[side] = {
            key: value if isinstance(value, str) else statistics.median(line[key] for line in rounds)
            for key, value in rounds[0].items()
        }
    return results


def show(task: str, results: Results, columns: dict[str, str]) -> None:
    """Prints the results as a table, and writes them to a JSON file in runs/bench/.

    The last row of each case contains the ratio of this package to the best baseline, for the columns `seconds` and
    `peak_gb`.

    Args:
      task: "update", "decode" or "step".
      results: Results from `measure`.
      columns: Format specifications of the columns, by key of the results.
    """
    table = Table("case", "side", *columns)
    ratios: dict[str, dict[str, float]] = {}
    for case, by_side in results.items():
        for side, line in by_side.items():
            table.add_row(case, side, *(format(line[key], spec) for key, spec in columns.items()))
        if "ours" in by_side:
            peers = [line for side, line in by_side.items() if side != "ours"]
            ratios[case] = {
                key: by_side["ours"][key] / min(line[key] for line in peers)
                for key in ("seconds", "peak_gb")
                if key in columns
            }
            cells = (f"{ratios[case][key]:.2f}x" if key in ratios[case] else "" for key in columns)
            table.add_row(case, "ours / best baseline", *cells, style="bold")
        table.add_section()
    CONSOLE.print(table)
    for case, by_side in results.items():
        for side, line in by_side.items():
            CONSOLE.print(f"{case}, {side}: {line['setting']}")
    file = RESULTS / f"{task}_peers.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    machine = {"processor": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0))}
    content = {"machine": machine, "rounds": ROUNDS, "results": results, "ours_over_best_peer": ratios}
    file.write_text(json.dumps(content, indent=2) + "\n")
    CONSOLE.print(f"Written to {file.relative_to(ROOT)}")
