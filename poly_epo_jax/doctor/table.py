"""Shows findings as a table, and converts them for JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from poly_epo_jax.doctor.finding import Finding

COLORS = {"passed": "green", "failed": "bold red", "not there": "dim"}
WIDTH = 110  # at least, even if the output is a file


def show(findings: Sequence[Finding], console: Console) -> None:
    """Prints a line for each finding, and the number of each kind."""
    console.width = max(console.width, WIDTH)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("check", max_width=32, overflow="fold")
    table.add_column("result", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    table.add_column("what was seen, and what to do")
    for one in findings:
        color = COLORS[one.status]
        table.add_row(escape(one.name), f"[{color}]{one.status}[/]", f"{one.seconds:.1f}", f"{escape(one.seen)}.")
    console.print(table)
    counts = [f"{sum(one.status == status for one in findings)} {status}" for status in COLORS]
    console.print(f"Doctor: {', '.join(counts)}.")


def as_rows(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(one) | {"figures": dict(one.figures)} for one in findings]
