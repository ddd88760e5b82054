"""The registries of metrics: names, titles, and the values that registered functions compute."""

import re
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fakes import PATIENCE
from tiny_training import train_tiny

from poly_epo_jax.metrics import evaluation, logged
from poly_epo_jax.metrics.evaluation import (
    EVALUATION_METRICS,
    EvaluationMetric,
    at,
    powers_of_two,
    problem_values,
    split,
    table_columns,
)
from poly_epo_jax.metrics.logged import LOGGED_METRICS, describe, held_out, is_held_out
from poly_epo_jax.records.run_folder import METRICS, TIMING, read_rows
from poly_epo_jax.set_rl import clip_cov_loss
from poly_epo_jax.system.daemon_thread import LateCallError

CONDITIONAL = (
    *("judge/retries", "judge/shortened_responses", "judge/prompt_tokens", "judge/reply_tokens"),
    *("grader/timeouts", "grader/crashes"),
    *("rollouts/server_failures", "rollouts/resampled", "rollouts/invalid_responses"),
    *("mismatch/truncated_fraction", "mismatch/masked_responses", "memory/peak_bytes"),
    *("data/too_old", "data/too_old_length"),
)
"""Metrics that are only logged with servers, mathematical answers, mismatch corrections or generation ahead."""
ARRAYS = {"rewards": np.eye(3, 4), "correct": np.eye(3, 4) == 1}
COVER = ("cover@0.2", "cover@0.5", "cover@0.8")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch):
    """Registers the metric `mine` for one test."""

    def register(function, title="mine@{k}", **fields) -> None:
        monkeypatch.setattr(evaluation, "EVALUATION_METRICS", dict(EVALUATION_METRICS))
        evaluation.EVALUATION_METRICS["mine"] = EvaluationMetric(function, title, "Means {k}.", **fields)

    return register


def test_names_are_split_into_stem_and_k():
    assert at("pass", 64) == "pass@64" and split("pass@64") == ("pass", 64)
    assert at("answer_entropy", None) == "answer_entropy" and split("answer_entropy") == ("answer_entropy", None)
    assert split("odd@x") == ("odd@x", None)
    assert logged.HELD_OUT_CORRECT_CLUSTERS == "eval/correct_clusters@8"
    assert is_held_out(held_out("reward")) and not is_held_out("reward")


@pytest.mark.parametrize(("largest", "expected"), [(1, [1]), (7, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_sizes_are_powers_of_two(largest: int, expected: list[int]):
    assert powers_of_two(largest) == expected


def test_metrics_are_computed_from_the_given_arrays():
    assert problem_values(ARRAYS).keys() == {*(f"pass@{k}" for k in (1, 2, 3, 4)), "solved", *COVER}
    assert problem_values(ARRAYS, curves=False).keys() == {*(f"pass@{k}" for k in (1, 2, 4)), "solved", *COVER}
    clusters = ARRAYS | {"clusters": np.arange(12).reshape(3, 4)}
    found = problem_values(clusters, reading="clusters")
    assert found.keys() == {f"{name}_clusters@{k}" for name in ("correct", "incorrect") for k in (1, 2, 4)}
    assert found["incorrect_clusters@4"].tolist() == [3.0, 3.0, 3.0]


def test_a_metric_that_does_not_return_raises_an_error(monkeypatch: pytest.MonkeyPatch):
    event = threading.Event()

    def wait(rewards):
        assert event.wait(PATIENCE)
        return rewards.sum(axis=1)

    monkeypatch.setattr(evaluation, "EVALUATION_METRICS", {"mine": EvaluationMetric(wait, "mine", "Waits.")})
    limit = (
        r"^The function of the evaluation metric 'mine' did not return within rollouts\.grading_timeout_seconds=0\.01"
    )
    with pytest.raises(LateCallError, match=limit):
        problem_values(ARRAYS, timeout_seconds=0.01)
    event.set()


def test_a_metric_that_raises_a_timeout_error_names_the_line(registered):
    def connect(rewards):
        raise TimeoutError("no route")

    registered(connect)
    with pytest.raises(ValueError, match=rf"'mine' raised TimeoutError at {re.escape(__file__)}:\d+: no route"):
        problem_values(ARRAYS)


def test_a_registered_metric_is_computed_and_shown(registered):
    registered(lambda rewards, k: k * rewards.sum(axis=1), digits=1)
    values = problem_values(ARRAYS)
    assert [values[f"mine@{k}"].tolist() for k in (1, 2, 4)] == [[1.0] * 3, [2.0] * 3, [4.0] * 3]
    columns = table_columns(values, "report")
    assert list(columns) == ["pass@1", "pass@4", "mine@4"]
    assert (columns["mine@4"].title, columns["mine@4"].meaning, columns["mine@4"].digits) == (
        "mine@4",
        "Means 4.",
        1,
    )
    assert describe("eval/mine@4").title == "Held-out mine@4"


@pytest.mark.parametrize("values", [np.ones(2), np.float64(1), np.array([1, np.nan, 1])])
def test_a_metric_without_a_finite_value_for_each_problem_is_rejected(registered, values: np.ndarray):
    registered(lambda correct: values)
    with pytest.raises(ValueError, match=r"'mine'.* 3 problems"):
        problem_values(ARRAYS)


@pytest.mark.parametrize("values", [None, "abc", ["a", "b", "c"], [None] * 3, np.ones((3, 1)), [1.0, 1.0]], ids=str)
def test_a_metric_without_numbers_is_rejected(registered, values: object):
    registered(lambda correct: values)
    with pytest.raises(ValueError, match=r"'mine'.* finite value for each of the 3 problems"):
        problem_values(ARRAYS)


@pytest.mark.parametrize("value", [1.5, -0.5])
def test_a_fraction_outside_its_range_is_rejected(registered, value: float):
    registered(lambda correct: np.full(3, value), is_fraction=True)
    with pytest.raises(ValueError, match=r"'mine' has a value outside \[0, 1\]"):
        problem_values(ARRAYS)


def test_fractions_are_declared():
    """All values of these metrics lie in [0, 1] by definition, so their intervals do not have zero width at 0 and 1."""
    fractions = {name for name, metric in EVALUATION_METRICS.items() if metric.is_fraction}
    majority = {"majority_accuracy", "majority_vote_share"}
    assert fractions == {"pass", "mean_reward", "best_reward", "solved", *majority, *COVER}


def test_a_metric_can_return_a_list_or_booleans(registered):
    registered(lambda correct: correct.any(axis=1).tolist())
    assert problem_values(ARRAYS)["mine"].tolist() == [True] * 3


def test_a_metric_that_raises_is_named_with_its_line(registered):
    registered(lambda correct: correct / "text")
    with pytest.raises(ValueError, match=rf"metric 'mine' raised \w+ at {re.escape(__file__)}:\d+: "):
        problem_values(ARRAYS)


def test_two_metrics_with_the_same_name_are_rejected(registered, monkeypatch: pytest.MonkeyPatch):
    registered(lambda correct: correct.mean(axis=1))
    monkeypatch.setitem(evaluation.EVALUATION_METRICS, "pass@2", evaluation.EVALUATION_METRICS["mine"])
    with pytest.raises(ValueError, match="named 'pass@2'; register 'pass@2' under another name"):
        problem_values(ARRAYS)


def test_a_metric_that_reads_an_unknown_array_is_rejected(registered):
    with pytest.raises(ValueError, match="'corect'"):
        registered(lambda corect: corect)


def test_metrics_without_an_entry_are_shown_by_name():
    assert list(table_columns(["pass@1", "{theirs}@2", "{theirs}@1"], "evaluate")) == ["pass@1", "{theirs}@2"]
    assert evaluation.describe("{theirs}@2").title == "{theirs}@2"
    assert describe("theirs/count") == logged.LoggedMetric("theirs/count", "")
    assert describe("eval/theirs@2").title == "Held-out theirs@2"


def test_every_entry_has_a_title_and_a_sentence():
    entries = {**EVALUATION_METRICS, **LOGGED_METRICS}
    for name, entry in entries.items():
        assert entry.title and entry.meaning.endswith(".") and entry.meaning[0].isupper(), name


def test_an_entry_for_a_prefix_describes_the_names_below_it():
    assert describe("seconds/generate") == LOGGED_METRICS["seconds/*"]
    assert describe("seconds/step") == LOGGED_METRICS["seconds/step"]
    assert describe("judge/failed/timeout") == LOGGED_METRICS["judge/failed/*"]


@pytest.mark.slow
def test_every_logged_metric_has_an_entry(tmp_path: Path):
    loss = partial(clip_cov_loss, clip_low=0.2, clip_high=0.28)
    train_tiny(tmp_path, failing=["q"], loss=loss, changes={"algo.kl_coef": 0.1})
    rows = read_rows(tmp_path / METRICS) + read_rows(tmp_path / TIMING)
    names = {name for row in rows for name in row} - {"step"}
    assert {"policy/covariance_fraction", "policy/reference_kl", "eval/pass@2", "seconds/update"} <= names
    assert [name for name in names if name.startswith("judge/failed/")]
    assert not [name for name in (*names, *CONDITIONAL) if not describe(name).meaning]
