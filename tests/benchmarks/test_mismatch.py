"""Tests of benchmarks/mismatch.py with stand-ins for training and servers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_both_servers_train_the_base_policy_with_learning_rate_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "mismatch", raising=False)
    import mismatch  # pyright: ignore[reportMissingImports]

    started: list[tuple[str, str]] = []

    def run(command: list[str], check: bool, env: dict[str, Any] | None = None) -> None:
        flags = dict(flag.removeprefix("--config.").split("=", 1) for flag in command if "--config." in flag)
        workdir = Path(flags["workdir"])
        workdir.mkdir()
        if env is None:
            policy = Path(flags["base.cache_dir"]) / "policy"
            policy.mkdir(parents=True)
            (policy / "config.json").touch()
            return
        assert flags["optimizer.learning_rate"] == "0.0"
        started.append((env["SERVER"], env["POLICY"]))
        rows = ({"step": step, "mismatch/mean": step, "mismatch/max": 10 * step} for step in range(1, 9))
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(subprocess, "run", run)
    mismatch.main(tmp_path, 8)
    policy = str(tmp_path / "base" / "policy")
    assert started == [("sglang", policy), ("vllm", policy)]
    assert "vLLM: mismatch/max 1.50e+01 in the first quarter, 7.50e+01 in the last" in capsys.readouterr().out
    assert (tmp_path / "mismatch.png").stat().st_size > 0
