"""Runs a fault-injection test and reports how many attempts passed and failed. See docs/explanation/reliability.md.

    python fuzz settings --attempts 5000 [--seed 1] [--output settings.json]

A test is a module of this folder with a generator `attack(random, folder)`, which yields an Outcome for each attempt
without end. The command prints each failure in full, and exits with code 1 if an attempt failed.
"""

import argparse
import importlib
import json
import random
import sys
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).parent
NAMES = sorted({path.stem for path in HERE.glob("*.py")} - {"__main__", "outcome"})


def main() -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python fuzz", description="Runs a fault-injection test; see docs/explanation/reliability.md."
    )
    parser.add_argument("name", choices=NAMES, help="name of the test")
    parser.add_argument("--attempts", type=int, default=20, help="number of attempts (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--output", type=Path, help="JSON file for the summary")
    arguments = parser.parse_args()
    sys.path[:0] = [
        str(HERE.parent),
        str(HERE.parent / "tests" / "support"),
    ]  # the package of this repository, and the support modules of its tests
    attack = importlib.import_module(arguments.name).attack

    tried, held, failures = Counter[str](), Counter[str](), []
    console = Console(stderr=True)
    bar = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console)
    with tempfile.TemporaryDirectory() as folder, bar:
        progress = bar.add_task(arguments.name)
        for outcome in islice(attack(random.Random(arguments.seed), Path(folder)), arguments.attempts):
            tried[outcome.kind] += 1
            held[outcome.kind] += outcome.held
            if not outcome.held:
                failures.append(outcome)
                console.print(f"FAILED {outcome.kind}: {outcome.what}", markup=False, highlight=False)
            bar.update(progress, description=f"{arguments.name}: {tried.total()} tried, {len(failures)} failed")

    table = Table("attack", "tried", "held", "failed")
    for kind in sorted(tried):
        table.add_row(kind, str(tried[kind]), str(held[kind]), str(tried[kind] - held[kind]))
    table.add_row("all", str(tried.total()), str(held.total()), str(len(failures)))
    Console().print(table)
    if arguments.output:
        summary = {"tried": dict(tried), "held": dict(held), "failures": [vars(failure) for failure in failures]}
        arguments.output.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if failures or not tried else 0


if __name__ == "__main__":
    sys.exit(main())
