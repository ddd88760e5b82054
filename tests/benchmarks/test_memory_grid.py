"""Compares memory plans with the programs of benchmarks/memory_grid.py, and those with newly compiled programs."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
LOWEST, HIGHEST = 0.97, 1.08  # ratio of planned to held bytes


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "memory_grid", raising=False)
    import memory_grid  # pyright: ignore[reportMissingImports]

    return memory_grid


def test_plans_match_all_points_of_the_grid(grid: ModuleType):
    found = grid.found()
    assert set(found) == set(grid.POINTS)
    plans = {point: point.plan() for point in found}
    ratios = {
        point: plan.stage_bytes("gradient") / grid.held_bytes(plan, found[point]) for point, plan in plans.items()
    }
    assert not {point: ratio for point, ratio in ratios.items() if not LOWEST <= ratio <= HIGHEST}


@pytest.mark.slow
@pytest.mark.skipif(
    not (ROOT / ".venv-tpu").exists(), reason="needs the environment of: bash launch/compiler_env.sh tpu"
)
@pytest.mark.parametrize("model, remat", [("Qwen3-4B", "none"), ("Gemma-3-1B", "dots")])
def test_compiled_programs_are_those_of_the_grid(grid: ModuleType, model: str, remat: str):
    indices = {(point.model, point.remat): i for i, point in enumerate(grid.POINTS) if point.machine == "v5p-8"}
    index = indices[model, remat]
    assert grid.program_bytes(index)["bytes"] == pytest.approx(grid.found()[grid.POINTS[index]]["bytes"], rel=0.005)
