"""Tests of benchmarks/theory at a small size, and of the statements in docs/explanation/theory.md about its results."""

import importlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "theory"
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "theory.md"
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


def test_the_sign_for_a_novel_incorrect_response():
    """Compares the formula of theory.md with an enumeration of the strategies of a set: 0 only for n = 2, m = 1."""

    def mean_distinct(k: int, m: int) -> Fraction:
        return Fraction(sum(len(set(drawn)) for drawn in itertools.product(range(m), repeat=k)), m**k)

    for n, m in itertools.product(range(2, 6), range(1, 5)):
        # Rewards do not depend on strategies, so p^-1 E[f] is a product: with the response, one of n rewards is 0.
        advantage = Fraction(n - 1, n) * (1 + mean_distinct(n - 1, m)) / n - mean_distinct(n, m) / n
        formula = n - 1 - m + (m - n) * (1 - Fraction(1, m)) ** (n - 1)
        assert advantage == formula / n**2
        expected = 0 if (n, m) == (2, 1) else 1 if m <= n - 2 else -1
        assert (formula > 0) - (formula < 0) == expected


def test_the_page_states_the_thresholds_of_reward_shaping():
    """With a group of 8 that contains the response: lambda (1 - E[d]) with E[d] over the other 7 generations."""
    rows = re.findall(r"^\| ([\d.]+) \| (\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 6
    for diversity_coef, num_strategies, *stated in rows:
        scale, m = float(diversity_coef), int(num_strategies)
        policy = scale * (1 - (m * (1 - (1 - 1 / m) ** 8) - 1) / 7)
        group = scale * (1 - m * (1 - (1 - 1 / m) ** 7) / 7) * 8 / 7
        assert stated == [f"{value:.3f}".removeprefix("0") for value in (policy, group, group)]


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
