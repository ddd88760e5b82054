"""Console tables, and JSON files with their contents."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from poly_epo_jax.system.json_files import write_json


def wide_console() -> Console:
    """Returns a console of at least 120 characters or, if the output is a file or a pipe, of 1,000: no table is cut."""
    console = Console()
    return Console(width=max(console.width, 120 if console.is_terminal else 1000))


def console_table(left: Sequence[str], right: Sequence[str], wrapped: str = "") -> Table:
    """Returns an empty table.

    Args:
      left: Names of the left-aligned columns, which come first.
      right: Names of the right-aligned columns.
      wrapped: Name of the column whose text is wrapped if the table is wider than the console.
    """
    columns = (
        Column(name, justify="right" if name in right else "left", no_wrap=name != wrapped) for name in (*left, *right)
    )
    return Table(*columns, box=box.SIMPLE_HEAD)


def write_figures(output: Path, found: Any, console: Console) -> None:
    """Writes results to a JSON file and prints its path.

    Args:
      output: Path of the file. Its folder is created if it does not exist.
      found: Results that can be converted to JSON.
      console: Console to which the path is printed.
    """
    write_json(output, found)
    console.print(f"Written to {output}.")
