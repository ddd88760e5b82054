"""Tests of benchmarks/compiled_machines.py without a compiler, and of its results."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RESULT = {"layers": 2, "bytes": 10**9, "planned_bytes": 10**9, "seconds_per_row": 0.5, "mfu": 0.3}


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "compiled_machines", raising=False)
    import compiled_machines  # pyright: ignore[reportMissingImports]

    return compiled_machines


def test_programs_fit_their_plan_and_are_in_the_documentation(machines: ModuleType):
    found = machines.found()
    assert found and found.keys() <= set(machines.POINTS)
    assert all(row["bytes"] <= 1.05 * row["planned_bytes"] for row in found.values() if "error" not in row)
    page = (ROOT / "docs" / "explanation" / "performance.md").read_text()
    assert "\n".join(machines.table()) in page


def test_only_missing_programs_of_the_given_machines_are_compiled(
    machines: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    compiled = []

    def compile_point(point: tuple[object, ...]) -> dict[str, object]:
        compiled.append(point)
        return {"error": "out of memory"} if point[1] == "Qwen3-4B" else RESULT

    monkeypatch.setattr(machines, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(machines, "compile_point", compile_point)
    monkeypatch.setattr(sys, "argv", ["compiled_machines.py", "v5e-1"])
    for _ in range(2):
        machines.main()
    assert compiled == [("v5e-1", "Qwen3-0.6B", 2), ("v5e-1", "Qwen3-4B", 2)]
    assert capsys.readouterr().out.splitlines()[-1] == "| v5e-1 | 1.0, 0.50 | not compiled: out of memory |"
    monkeypatch.setattr(sys, "argv", ["compiled_machines.py", "v7x-8"])
    with pytest.raises(SystemExit, match="v7x-8"):
        machines.main()
