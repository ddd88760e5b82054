"""Compares the tables of docs/reference/hardware.md with the memory plan."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "hardware_table.py"


@pytest.mark.slow
def test_the_tables_are_those_of_the_memory_plan():
    names = runpy.run_path(str(SCRIPT))
    found = names["PAGE"].read_text().partition(names["START"])[2].partition(names["END"])[0]
    assert found == names["table"](), "run python docs/hardware_table.py"
