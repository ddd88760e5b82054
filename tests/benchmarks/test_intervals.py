"""Tests of benchmarks/intervals.py at a small size."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_table_contrasts_printed_and_other_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "intervals", raising=False)
    import intervals  # pyright: ignore[reportMissingImports]

    small = {"SIZES": (20,), "SEEDS": (3,), "KS": (1, 16), "NUM_SAMPLES": 50, "NUM_PROBLEMS": 1000, "NUM_GROUPS": 100}
    for name, value in small.items():
        monkeypatch.setattr(intervals, name, value)
    intervals.main()
    header, _, *rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert all(len(row) == len(header) for row in rows)
    lowest = {(row[0], row[1]): float(row[4]) for row in rows}
    assert len(lowest) == len(rows) == 16
    for quantity, printed in {"pass@k": "fraction_interval", "difference in pass@k": "difference_interval"}.items():
        assert lowest[quantity, printed] > 0.8 and lowest[quantity, "bootstrap_interval"] < 0.5
