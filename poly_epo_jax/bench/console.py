"""Tables on the console, and files of the figures that they show."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from poly_epo_jax.system.json_files import write_json


def wide_console() -> Console:
    """Returns a console of at least 100 characters, even if the output is a file."""
    console = Console()
    console.width = max(console.width, 100)
    return console


def console_table(left: Sequence[str], right: Sequence[str]) -> Table:
    """Returns an empty table of left-aligned columns, followed by right-aligned columns. No column wraps its text."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in (*left, *right):
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return table


def write_figures(output: Path, found: Any, console: Console) -> None:
    """Writes figures to a JSON file, in a folder that is created if it does not exist, and prints its path."""
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, found)
    console.print(f"Written to {output}.")
