"""Tests of benchmarks that measure times, with small inputs."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from poly_epo_jax import set_rl
from poly_epo_jax.model import hf_files
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.step.advantages import ADVANTAGES

FOLDER = Path(__file__).parents[2] / "benchmarks"
TINY = ModelConfig(vocab_size=32, hidden_size=16, mlp_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that runs a benchmark with command line arguments and other values of its constants."""

    def run(name: str, *arguments: str, **constants: Any) -> None:
        monkeypatch.syspath_prepend(str(FOLDER))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        main = runpy.run_path(str(FOLDER / f"{name}.py"))["main"]
        main.__globals__.update(constants)
        main()

    return run


def test_every_estimator_and_closed_form_is_timed(benchmark: Callable[..., None], capsys: pytest.CaptureFixture[str]):
    benchmark("estimators", NUM_PROMPTS=2, NUM_GENERATIONS=8, DIMENSIONS=2, SET_SIZE=2, CALLS=1)
    lines = capsys.readouterr().out.splitlines()[1:]
    names = {line.split("  ")[0] for line in lines}
    closed = {f"marginal_set, {name}" for name, objective in set_rl.OBJECTIVES.items() if objective.closed_form}
    assert names == closed | (ADVANTAGES.keys() - {"marginal_set"})
    assert all(line.endswith(" ms") and float(line.split()[-2]) > 0 for line in lines)


def test_each_folder_is_written_with_one_and_several_threads(
    benchmark: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hf_files, "WRITERS", writers := hf_files.WRITERS)
    benchmark("weight_sync", str(tmp_path / "a"), str(tmp_path / "b"), CONFIG=TINY, ROUNDS=1)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert all(f", {writers} writers" in line for line in lines)
