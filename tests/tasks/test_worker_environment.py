"""Tests that processes which execute answers, moves and libraries of tasks do not inherit API keys."""

from pathlib import Path

import pytest

from poly_epo_jax.tasks.verifier import Grader, Verifier, worker_environment

READER = """
import os

def open_grader():
    return lambda name: os.environ.get(name, "missing")
"""


def test_workers_do_not_inherit_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "reader.py").write_text(READER)
    keys = ("GEMINI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY", "MY_PATH")
    for name in keys:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    pool = Verifier(1, grader=Grader("a reader", (str(tmp_path / "reader.py"),), str))
    assert [pool.call(name) for name in keys] == ["missing"] * len(keys)
    assert pool.call("LC_ALL") == "C.UTF-8"
    pool.close()
    assert "PATH" in worker_environment() and "secret" not in worker_environment().values()
