"""Shared by the three *_peers.py: the peers' environments, children that measure, and their table.

A peer's packages are pinned in requirements-<peer>.txt and installed into env-<peer>, next to this file. All children
run on the CPU in the same way: with this package's folder to import from, and as many threads as the process has cores.
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

Results = dict[str, dict[str, dict[str, Any]]]  # case -> side -> a child's line, its numbers being medians over rounds


@dataclasses.dataclass(frozen=True)
class Side:
    """One of those compared: `<task>_<name>.py` measures it, run by `python`."""

    name: str
    python: Path

    def run(self, task: str, *arguments: str) -> list[dict[str, Any]]:
        """The lines of JSON that the child prints, one per case."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        command = [self.python, HERE / f"{task}_{self.name}.py", *arguments]
        child = subprocess.run(command, env=environment, capture_output=True, text=True)
        if child.returncode:
            raise SystemExit(f"{' '.join(map(str, command))} failed:\n{child.stderr}")
        return [json.loads(line) for line in child.stdout.splitlines() if line.startswith('{"')]


def sides(task: str) -> list[Side]:
    """Ours, if it is there for this task, then the peers; their environments are made if need be."""
    ours = [Side("ours", Path(sys.executable))] if (HERE / f"{task}_ours.py").exists() else []
    if not ours:
        CONSOLE.print(f"[bold]There is no {task}_ours.py: only the peers are measured.")
    peers = [name for name in ("transformers", "tunix", "trl") if (HERE / f"{task}_{name}.py").exists()]
    return ours + [Side(name, _environment(name)) for name in peers]


def _environment(name: str) -> Path:
    """The interpreter of a peer's environment, installed anew where its pins have changed."""
    folder, pins = HERE / f"env-{name}", HERE / f"requirements-{name}.txt"
    python = folder / "bin" / "python"
    stamp = folder / f"installed-{hashlib.sha256(pins.read_bytes()).hexdigest()[:16]}"
    if not stamp.exists():
        CONSOLE.print(f"Installing {name} into {folder} (a few minutes) ...")
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # PyPI's torch may need CUDA's libraries; the one built for CPUs has an index of its own.
        torch = [pin for pin in pins.read_text().split() if pin.startswith("torch==")]
        if torch:
            subprocess.run([*install, "--extra-index-url", TORCH_FOR_CPU, *torch], check=True)
        subprocess.run([*install, "--requirement", pins], check=True)
        stamp.touch()
    return python


def measure(task: str, cases: Sequence[Sequence[str]], folder: str = "") -> Results:
    """Runs every side's child with a model's folder and each of `cases`, in turn, ROUNDS times over.

    Args:
      folder: the model's; empty: that of peers_model.py.
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
    """Prints a table with `columns`, each a key of the children's lines and its format, and writes it as JSON.

    Below each case stands ours over the best of the peers, in the columns `seconds` and `peak_gb`.
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
            table.add_row(case, "ours / best peer", *cells, style="bold")
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
