"""Compares memory plans with the compiled programs of benchmarks/memory_grid.py, and with newly compiled programs."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-tpu" / "bin" / "python"
LOWEST, HIGHEST = 0.97, 1.08  # ratio of planned to held bytes


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "memory_grid", raising=False)
    import memory_grid  # pyright: ignore[reportMissingImports]

    return memory_grid


def test_plans_match_all_points_of_the_grid(grid: ModuleType):
    found = grid.found()
    assert list(found) == list(grid.POINTS)
    ratios = {point: planned / held for point, row in found.items() for held, planned in [grid.compared(point, row)]}
    assert not {point: ratio for point, ratio in ratios.items() if not LOWEST <= ratio <= HIGHEST}
