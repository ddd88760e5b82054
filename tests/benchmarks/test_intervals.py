"""Tests of benchmarks/intervals.py at a small size."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_tables_contrast_both_intervals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "intervals", raising=False)
    import intervals  # pyright: ignore[reportMissingImports]

    for name, value in {"SIZES": (30,), "NUM_BENCHMARKS": 100, "NUM_TRUTH": 10_000}.items():
        monkeypatch.setattr(intervals, name, value)
    intervals.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    coverage = {row[0]: [float(cell.split()[0]) for cell in row[4:]] for row in rows if row[1:3] == ["30", "16"]}
    assert len(coverage) == 10
    bootstrap, fraction = coverage["0/1, 0.97 solved"]
    assert bootstrap < 0.7 and fraction > 0.94
    assert [len(row) for row in rows if row[0] == "uniform"] == [6, 6, 6, 6, 6]
