"""Tests of benchmarks/staleness.py with a stand-in for training and the server."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def staleness(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "staleness", raising=False)
    import staleness  # pyright: ignore[reportMissingImports]

    return staleness


def test_the_union_of_intervals_is_measured(staleness: Any):
    assert staleness.covered([(4, 5), (0, 2), (1, 3), (2, 2.5)]) == 4
    assert staleness.covered([]) == 0


def test_each_case_is_trained_once_and_reported(
    staleness: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    started: list[dict[str, str]] = []

    def run(command: list[str], check: bool, env: dict[str, Any]) -> None:
        flags = dict(flag.removeprefix("--config.").split("=", 1) for flag in command if "--config." in flag)
        assert (env["SERVER"], env["POLICY"]) == ("sglang", "model")
        started.append(flags)
        workdir, age = Path(flags["workdir"]), int(flags["train.staleness"])
        workdir.mkdir(parents=True)
        metrics = [{"step": step, "response/staleness": age, "mismatch/mean": 1e-6, "reward": step} for step in (1, 2)]
        # Generation from 0 to 6 s, and training from 6 s, or 4 s with staleness, to 10 s.
        spans = [["generate", 0, 6, 1], ["logprobs", 6 - 2 * bool(age), 7, 1], ["update", 7, 10, 1]]
        windows = [{"step": step, "start": 0, "seconds": 10 * step, "spans": spans} for step in (1, 2)]
        for name, rows in (("metrics", metrics), ("timeline", windows)):
            (workdir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        staleness.main("model", tmp_path, 2)
    assert [(flags["train.staleness"], flags.get("rollouts.in_flight")) for flags in started] == [
        ("0", None),
        ("1", None),
        ("3", "True"),
    ]
    printed = capsys.readouterr().out
    assert "| on-policy | 30.0 | 20.0 | 16.0 | 14.0 | 0 | 1e-06 | 2 |" in printed
    assert "| staleness 3, in flight | 30.0 | 20.0 | 14.0 | 14.0 | 3 | 1e-06 | 2 |" in printed
