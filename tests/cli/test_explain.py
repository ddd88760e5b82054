"""Compares `poly-epo explain` with the advantages of all sets, computed in this file."""

import itertools

import numpy as np
import pytest

from poly_epo_jax.cli.explain import group_advantages, in_rms_units, main

REWARDS, STRATEGIES = [1, 1, 1, 1, 1, 1, 0, 0], list("AAAAABAC")
B_RIGHT, C_WRONG, A_RIGHT, A_WRONG = 5, 7, 0, 6


def scores(rewards: list[int], strategies: list[str], set_size: int) -> dict[tuple[int, ...], float]:
    """Returns mean reward times the number of distinct strategies divided by n, for each set of n responses."""
    return {
        chosen: sum(rewards[i] for i in chosen) * len({strategies[i] for i in chosen}) / set_size**2
        for chosen in itertools.combinations(range(len(rewards)), set_size)
    }


@pytest.mark.parametrize("set_size", [2, 4, 7])
def test_the_advantage_is_the_mean_score_of_the_sets_with_the_response_minus_that_of_all_sets(set_size: int):
    by_set = scores(REWARDS, STRATEGIES, set_size)
    mean = np.mean(list(by_set.values()))
    expected = [
        np.mean([score for chosen, score in by_set.items() if response in chosen]) - mean for response in range(8)
    ]
    np.testing.assert_allclose(group_advantages(REWARDS, STRATEGIES, set_size)["Poly-EPO"], expected, atol=1e-6)


def test_the_numbers_of_the_documented_example():
    by_set = scores(REWARDS, STRATEGIES, 4)
    assert len(by_set) == 70 and sum(0 in chosen for chosen in by_set) == 35
    assert round(float(np.mean(list(by_set.values()))), 3) == 0.366
    advantages = group_advantages(REWARDS, STRATEGIES, 4)
    shown = {
        title: [round(float(values[i]), 3) for i in (B_RIGHT, C_WRONG, A_RIGHT, A_WRONG)]
        for title, values in advantages.items()
    }
    assert shown == {
        "GRPO": [0.25, -0.75, 0.25, -0.75],
        "GRPO+DIV": [0.607, -0.393, 0.131, -0.869],
        "MaxRL": [0.333, -1, 0.333, -1],
        "Poly-EPO": [0.098, 0.027, -0.009, -0.08],
    }


def test_more_strategies_than_the_id_of_degenerate_responses():
    """Each of 102 responses has a separate strategy and the same reward, so no response has an advantage."""
    advantages = group_advantages([1.0] * 102, [f"strategy {i}" for i in range(102)], 4)
    np.testing.assert_allclose(np.array(list(advantages.values())), 0, atol=1e-6)


def test_units():
    np.testing.assert_allclose(in_rms_units(np.array([3.0, -4.0])), np.array([3, -4]) / np.sqrt(12.5))
    np.testing.assert_array_equal(in_rms_units(np.zeros(3)), 0)


def test_the_table(capsys: pytest.CaptureFixture[str]):
    assert main(["--rewards", "1,1,1,1,1,1,0,0", "--strategies", "A,A,A,A,A,B,A,C"]) == 0
    assert (
        capsys.readouterr().out
        == """\
8 responses to one prompt form 70 sets of 4.

Advantages:
strategy  reward  responses      GRPO  GRPO+DIV     MaxRL  Poly-EPO
B         right           1    +0.250    +0.607    +0.333    +0.098
C         wrong           1    -0.750    -0.393    -1.000    +0.027
A         right           5    +0.250    +0.131    +0.333    -0.009
A         wrong           1    -0.750    -0.869    -1.000    -0.080

Advantages in units of each method's root mean square:
strategy  reward  responses      GRPO  GRPO+DIV     MaxRL  Poly-EPO
B         right           1      +0.6      +1.5      +0.6      +2.1
C         wrong           1      -1.7      -1.0      -1.7      +0.6
A         right           5      +0.6      +0.3      +0.6      -0.2
A         wrong           1      -1.7      -2.1      -1.7      -1.7
"""
    )


def test_partial_rewards_and_long_names(capsys: pytest.CaptureFixture[str]):
    assert main(["--rewards=1,0.5,0", "--strategies=by induction, by cases,by cases", "--set_size=2"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "3 responses to one prompt form 3 sets of 2."
    assert {tuple(row.split()[:4]) for row in rows[4:7]} == {
        ("by", "induction", "right", "1"),
        ("by", "cases", "0.5", "1"),
        ("by", "cases", "wrong", "1"),
    }
    assert len({len(row) for row in rows[3:7]}) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rewards=1,0 --strategies=A,B,C", "2 rewards do not match 3 strategies"),
        ("--rewards=1,1.5,0 --strategies=A,B,C --set_size=2", "The reward 1.5 is outside [0, 1]"),
        ("--rewards=1,nan,0 --strategies=A,B,C --set_size=2", "The reward nan is outside [0, 1]"),
        ("--rewards=1,0,0 --strategies=A,B,C", "num_generations=3 must exceed set_size=4"),
        ("--rewards=1,0,0 --strategies=A,B,C --set_size=0", "set_size=0 must be at least 1"),
    ],
)
def test_errors_are_one_sentence(flags: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(flags.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("Error: ") and message in err and err.count("\n") == 1


def test_rewards_that_are_not_numbers(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(["--rewards=1,x", "--strategies=A,B"])
    assert "--rewards: '1,x' must be numbers" in capsys.readouterr().err
