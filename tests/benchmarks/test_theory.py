"""Tests of benchmarks/theory at a small size, and of the statements in docs/explanation/theory.md about its results."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "theory"
Question = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def module() -> Iterator[Question]:
    """Imports modules of benchmarks/theory, which compute in float64."""
    sys.path.insert(0, str(FOLDER))
    with jax.enable_x64(True):
        yield importlib.import_module
    sys.path.remove(str(FOLDER))
    jax.config.update("jax_enable_x64", False)  # The command enables it permanently.


def test_the_lemma_holds_for_logits_and_at_first_order(module: Question, monkeypatch: pytest.MonkeyPatch):
    lemma = module("lemma")
    monkeypatch.setattr(lemma, "NUM_BANDITS", 200)
    for row in lemma.run():
        assert row["logit shift, largest error"] < 1e-9
        errors = [row[f"log-probability at rate {rate}"] for rate in ("1", "0.1", "0.01")]
        assert errors[0] < 0.1 and all(8 < errors[i] / errors[i + 1] < 12 for i in range(2))
        # The statement that probability grows exactly if A > 0 does not hold.
        assert row["A > 0, probability falls"] > 0.03 and row["A < 0, probability grows"] > 0.1


@pytest.mark.slow
def test_thresholds_of_reward_shaping_and_poly_epo(module: Question, monkeypatch: pytest.MonkeyPatch):
    shares = module("shares")
    monkeypatch.setattr(shares, "SUCCESS", np.array([0.05, 0.3, 0.99]))  # Advantages are linear between these rates.
    for row in shares.thresholds():
        assert row["measured"] == pytest.approx(row["beside it"], abs=1e-6)
        assert 0.85 * row["promised"] < row["measured"] < row["promised"]
    monkeypatch.setattr(shares, "FEW", (0.1, 0.9))
    for row in shares.own_thresholds(range(2, 5)):
        assert row["promised"] == row["at p = 0.1"] == row["at p = 0.9"] == row["set size"] - 2


@pytest.mark.slow
def test_sampled_sets_scale_all_advantages_equally(module: Question, monkeypatch: pytest.MonkeyPatch):
    sampled_sets = module("sampled_sets")
    monkeypatch.setattr(sampled_sets, "NUM_SETS", (2, 8))
    monkeypatch.setattr(sampled_sets, "NUM_DRAWS", 200)
    few, more = sampled_sets.run()
    for row in (few, more):
        assert abs(row["measured"] - row["promised"]) < 4 * row["standard error"]
        assert row["largest departure, in standard errors"] < 5
    assert few["noise of the sets"] > more["noise of the sets"]


def test_gradient_weights_of_ppo_and_cispo(module: Question):
    for row in module("clipping").weights():
        is_outside = row["ratio"] > 1.28 + 1e-9
        assert row["ppo_clip, A > 0"] == pytest.approx(0 if is_outside else row["ratio"])
        assert row["cispo, A > 0"] == pytest.approx(np.clip(row["ratio"], 0.8, 1.28))


@pytest.mark.slow
def test_the_command_writes_its_figure(module: Question, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    changes = {
        "lemma": {"NUM_BANDITS": 50},
        "shares": {"SUCCESS": np.array([0.1, 0.9]), "FEW": (0.5,), "PAIRS": ((8, 4), (5, 4))},
        "sampled_sets": {"NUM_SETS": (2, 8), "NUM_DRAWS": 20},
        "frontier": {"STEPS": 20, "DIV_COEFS": (0.0, 0.5), "SET_SIZES": (4,)},
        "clipping": {"UPDATES": (1, 2)},
    }
    for name, values in changes.items():
        for key, value in values.items():
            monkeypatch.setattr(module(name), key, value)
    monkeypatch.setattr(sys, "argv", ["theory", "--output", str(tmp_path)])
    runner = importlib.util.spec_from_file_location("theory_main", FOLDER / "__main__.py")
    assert runner and runner.loader
    command = importlib.util.module_from_spec(runner)
    runner.loader.exec_module(command)
    command.main()
    assert (tmp_path / "theory.png").stat().st_size > 10_000
    assert (tmp_path / "figures.json").stat().st_size > 1_000
