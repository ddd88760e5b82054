"""A password in the address of a server is neither shown nor stored, whatever else is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

SECRET = "hunter2"
ADDRESS = f"http://me:{SECRET}@host:30000"


@pytest.mark.parametrize(
    ("module", "arguments", "complaint"),
    [
        ("main", [f"--config.rollouts.urls=http://a:1,{ADDRESS}"], "rollouts.urls holds a user or password"),
        ("main", [f"--config.rollouts.urls=me:{SECRET}@host:30000"], "rollouts.urls holds a user or password"),
        ("main", [f"--config.judge.url={ADDRESS}", "--print_config"], "judge.url holds a user or password"),
        ("main", [f"--config.model.path={ADDRESS}"], "model.path holds a user or password"),
        ("main", [f"--rollouts.urls={ADDRESS}"], "write --config.rollouts.urls=...@host:30000"),
        ("main", [f"rollouts.urls={ADDRESS}"], "unknown argument ...@host:30000"),
        ("evaluate", [f"--models=x={ADDRESS}", "--benchmarks=polynomial"], "write it so, without a password"),
    ],
)
def test_it_is_refused_without_a_word_of_it(module: str, arguments: list[str], complaint: str, tmp_path: Path):
    command = [sys.executable, "-m", f"poly_epo_jax.{module}", "--config=configs/polynomial.py"]
    command += [f"--config.workdir={tmp_path / 'run'}", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[1])
    assert ended.returncode == 1 and complaint in ended.stderr
    assert SECRET not in ended.stdout + ended.stderr
    assert not list(tmp_path.rglob("*.json"))
