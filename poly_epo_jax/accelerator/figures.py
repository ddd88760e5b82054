"""Reads the results of the stages as figures: measured values, and expected values if there are any.

A figure is a row of the summary with the fields `name`, `measured`, `expected`, `ratio` and `status`. The status of a
value that is checked is `passed`, `failed` or `skipped`. Readers yield the figures that have been measured so far.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from poly_epo_jax.bench.console import console_table
from poly_epo_jax.records.run_folder import GENERATIONS, METRICS, TIMING, read_rows
from poly_epo_jax.study.results import read_results

# Upper bounds on the MFU of the gradient on an H100 or H200, from programs that were compiled but not run.
COMPILED_MFU = {"Qwen3-0.6B": 0.32, "Qwen3-1.7B": 0.45, "Qwen3-4B-LoRA": 0.45, "Qwen3-4B": 0.49}


def figure(name: str, measured: Any, expected: Any = None, status: str = "measured") -> dict[str, Any]:
    """Returns a figure. The ratio is None unless both values are floats."""
    ratio = measured / expected if isinstance(measured, float) and isinstance(expected, float) and expected else None
    return {"name": name, "measured": measured, "expected": expected, "ratio": ratio, "status": status}


def read_doctor(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the findings of the doctor."""
    for _, findings in _objects(folder):
        yield from (figure(one["name"], one["message"], status=one["status"]) for one in findings)


def read_learning(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the gain in reward, and the first difference between an uninterrupted and a resumed run of each kind."""
    for kind, other_status in (("deterministic", "failed"), ("default", "measured")):
        runs = [folder / kind, folder / f"{kind}-killed"]
        whole, resumed = ([row for row in read_rows(run / METRICS) if "reward" in row] for run in runs)
        if whole:
            gain = (sum(row["reward"] for row in whole[-5:]) - sum(row["reward"] for row in whole[:5])) / 5
            yield figure(f"{kind}: reward gain", gain, status="passed" if gain > 0 else "failed")
        if whole and len(whole) == len(resumed):
            pairs = zip(whole, resumed, strict=True)
            different = (f"{key} at step {a['step']}" for a, b in pairs for key in a if a[key] != b.get(key))
            files = [[(run / name).read_bytes() for name in (METRICS, GENERATIONS)] for run in runs]
            first = next(different, "none" if files[0] == files[1] else "bytes")
            yield figure(
                f"{kind}: difference after resume", first, "none", "passed" if first == "none" else other_status
            )


def read_bench(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields speed and its limit by measured matmul rate and bandwidth, MFU, memory and compile time of stages."""
    for name, bench in _objects(folder):
        is_hopper = any(card in bench["setting"]["device"] for card in ("H100", "H200"))
        yield figure(f"{name}: matmul TFLOP/s", bench["setting"]["device_tflops"], bench["setting"]["vendor_tflops"])
        for stage in bench["stages"]:
            label, limit = f"{name}, {stage['name']}", stage["tokens"] / stage["roofline_seconds"]
            yield figure(f"{label}: tokens/s", stage["tokens_per_second"], limit)
            if stage["mfu"] and stage["name"] == "gradient":
                yield figure(f"{label}: MFU", stage["mfu"], COMPILED_MFU.get(name) if is_hopper else None)
            if stage["peak_bytes"]:
                yield figure(f"{label}: peak GB", stage["peak_bytes"] / 1e9, (stage["planned_bytes"] or 0) / 1e9)
            yield figure(f"{label}: compile s", stage["compile_seconds"])


def read_step(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the seconds of each stage in the last step of each method, and those of the whole step."""
    for method in ("grpo", "poly_epo"):
        for row in read_rows(folder / method / TIMING)[-1:]:
            times = {key.removeprefix("seconds/"): row[key] for key in row if key.startswith("seconds/")}
            times["judge and advantages"] = times.get("judge", 0.0) + times["advantages"]
            yield from (figure(f"{method}: {stage} s", value, times["step"]) for stage, value in times.items())


def read_tests(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the number of tests that passed, and the name of each test that failed."""
    results = re.findall(r"(\S+::\S+) (PASSED|FAILED|ERROR)", (folder / "pytest.log").read_text(errors="replace"))
    failed = [name for name, result in results if result != "PASSED"]
    yield figure("tests that passed", float(len(results) - len(failed)), float(len(results)))
    yield from (figure("failed test", name, status="failed") for name in failed)


def read_comparison(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields pass@k of each method over its finished runs, and the difference between the methods, paired by seed."""
    results = read_results(folder.parent / "runs" / "study-accelerator")
    for cell, metric in itertools.product(results.cells("countdown"), ("pass@64", "pass@8", "pass@1")):
        if values := [*results.by_seed(cell, f"countdown: {metric}").values()]:
            yield figure(f"{cell[1]}: {metric} of {len(values)} seeds", sum(values) / len(values))
        if difference := results.difference(cell, f"countdown: {metric}"):
            yield figure(f"{cell[1]} - {results.baseline}: {metric}", "{:+.3f} [{:+.3f}, {:+.3f}]".format(*difference))


def _objects(folder: Path) -> Iterator[tuple[str, Any]]:
    # Names and contents of the JSON files of a stage, oldest first.
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime):
        yield path.stem, json.loads(path.read_text())


def show(stages: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Prints the summary as a table with one line per figure.

    Args:
      stages: Stages of the summary, by name.
      console: Console to which the table is printed.
    """
    table = console_table(("stage", "figure", "measured", "expected"), ("ratio", "status"), wrapped="measured")
    for name, stage in stages.items():
        table.add_row(name, "", f"{stage.get('seconds', 0):.0f} s", "", "", stage["status"])
        for one in stage["figures"]:
            shown = (
                f"{x:,.4g}" if isinstance(x, float) else escape(str(x or ""))
                for x in map(one.get, ("name", "measured", "expected", "ratio"))
            )
            table.add_row("", *shown, one["status"])
    console.print(table)
    messages = [f"{name}: {message}" for name, stage in stages.items() for message in stage["messages"]]
    console.print("\n".join(messages), markup=False, soft_wrap=True)
