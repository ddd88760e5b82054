"""Tests of the results of audits: planted truth, the objective of set_rl, and the coverage of the intervals."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from poly_epo_jax.metrics.diversity import num_clusters, polychromic_value
from poly_epo_jax.metrics.judge_audit import AUDIT_METRICS, ratio_over_problems, summarize
from poly_epo_jax.set_rl import enumerate_sets, polychromic
from poly_epo_jax.types import DEGENERATE_CLUSTER

RUNS, PROMPTS, RESPONSES = 1000, 16, 8


def row(clusters: Sequence[int], auditor: Sequence[int] | None, probes: Mapping[Any, Any]) -> dict[str, Any]:
    return {"rewards": [1.0, 0.0] * (len(clusters) // 2), "clusters": clusters, "auditor": auditor, "probes": probes}


def test_a_perfect_judge_has_rates_0_inflation_1_and_adjusted_rand_index_1_within_the_intervals():
    rng = np.random.default_rng(0)
    rates = dict.fromkeys(("repetition", "order", "paraphrase", "announcement", "padding"), 0.0)
    ids = [rng.integers(0, 4, RESPONSES).tolist() for _ in range(PROMPTS)]
    found = summarize([row(one, [5 - i for i in one], rates) for one in ids], set_size=4)
    truth = {name: 0.0 for name in rates} | {"inflation": 1.0, "adjusted_rand_index": 1.0, "pairwise_agreement": 1.0}
    for name, value in truth.items():
        assert found[name]["mean"] == value and found[name]["low"] - 1e-9 <= value <= found[name]["high"] + 1e-9, name
    assert found["objective"] == found["auditor_objective"]


def test_missing_values_are_left_out():
    missing = dict.fromkeys(("repetition", "order", "paraphrase", "announcement", "padding"))
    found = summarize([row([0, 1], None, missing), row([0, 0], None, missing | {"order": 0.5})], set_size=2)
    assert found["clusters"]["mean"] == 1.5 and found["order"]["num_problems"] == 1
    assert [name for name in AUDIT_METRICS if found[name] is None] == [
        *("inflation", "adjusted_rand_index", "pairwise_agreement", "auditor_clusters", "auditor_objective"),
        *("repetition", "paraphrase", "announcement", "padding"),
    ]
    assert ratio_over_problems([(1, 0), (2, 0)]) is None


@pytest.mark.parametrize("set_size", [1, 2, 4])
def test_the_objective_equals_the_mean_over_all_sets_of_set_rl(set_size: int):
    rng = np.random.default_rng(set_size)
    rewards, clusters = rng.random(RESPONSES), rng.choice([0, 1, 2, DEGENERATE_CLUSTER], RESPONSES)
    sets = enumerate_sets(RESPONSES, set_size)
    expected = np.mean(np.asarray(polychromic(rewards[sets].astype(np.float32), clusters[sets])))
    assert polychromic_value(rewards, clusters, set_size) == pytest.approx(expected, abs=1e-6)


def test_the_objective_of_many_responses_is_estimated():
    clusters = np.arange(40) % 5
    # A set of 4 of 40 responses has in expectation 5 (1 - C(32, 4) / C(40, 4)) clusters.
    expected = 5 * (1 - np.prod([(32 - i) / (40 - i) for i in range(4)])) / 4
    assert polychromic_value(np.ones(40), clusters, 4) == pytest.approx(expected, abs=0.01)


def test_the_interval_of_an_inflation_is_not_negative():
    found = ratio_over_problems([(8, 0), (2, 1), (0, 0), (0, 3)])
    assert found is not None and found["mean"] == 2.5 and found["low"] == 0
    assert ratio_over_problems([(3, 2)]) == {"mean": 1.5, "low": None, "high": None, "num_problems": 1}


def covered(found: dict[str, Any] | None, truth: float) -> bool:
    return found is not None and found["low"] <= truth <= found["high"]


@pytest.mark.slow
def test_intervals_cover_the_values_of_a_judge_of_known_error():
    """In each request, the judge moves each response to its own cluster with probability 0.2.

    A second judge moves the last two responses of each request. It assigns half of the copies with an
    announcement, and a tenth of those with a continuation, to another cluster.
    """
    error, num_strategies = 0.2, 3
    rng = np.random.default_rng(0)

    def judged(truth: np.ndarray) -> np.ndarray:
        moved = rng.random(truth.shape) < error
        return np.where(moved, num_strategies + np.arange(truth.shape[-1]), truth)

    # Each strategy remains if a response that has it is not moved. Each moved response adds a cluster.
    kept = num_strategies * (1 - ((num_strategies - 1 + error) / num_strategies) ** RESPONSES)
    strategies = num_strategies * (1 - ((num_strategies - 1) / num_strategies) ** RESPONSES)
    inflation = (kept + RESPONSES * error) / strategies
    # A pair with equal strategies is joined if neither is moved: q. Its verdict changes with probability 2 q (1 - q).
    joined = (1 - error) ** 2
    repetition = 2 * joined * (1 - joined) / num_strategies
    paraphrase = 1 - joined
    # Of the 28 pairs, 15 do not contain one of two responses: the last two of the recorded order, or a random two.
    order = 2 * (15 / 28) * (13 / 28) / num_strategies
    expected = {"repetition": repetition, "paraphrase": paraphrase, "order": order}
    expected |= {"announcement": 0.5, "padding": 0.1}
    hits = dict.fromkeys(("inflation", *expected), 0)
    pairs = np.triu_indices(RESPONSES, 1)
    for _ in range(RUNS):
        truth = rng.integers(0, num_strategies, (PROMPTS, RESPONSES))
        first, second = judged(truth), judged(truth)
        counts = [(num_clusters(ids), num_clusters(true)) for ids, true in zip(first, truth, strict=True)]
        places = rng.permuted(np.tile(np.arange(RESPONSES), (PROMPTS, 1)), axis=1)
        moved = [(place >= RESPONSES - 2) * (10 + np.arange(RESPONSES)) for place in (np.arange(RESPONSES), places)]
        requests = (first, second, *(np.where(one, one, truth) for one in moved))
        verdicts = [ids[:, pairs[0]] == ids[:, pairs[1]] for ids in requests]
        rates = {
            "repetition": (verdicts[0] != verdicts[1]).mean(axis=1),
            "order": (verdicts[2] != verdicts[3]).mean(axis=1),
        }
        copies = ("paraphrase", "announcement", "padding")
        rates |= {name: (rng.random(PROMPTS) < expected[name]).astype(float) for name in copies}
        rows = [
            row([0, 0], None, {name: values[prompt] for name, values in rates.items()}) for prompt in range(PROMPTS)
        ]
        found = summarize(rows, set_size=2)
        hits["inflation"] += covered(ratio_over_problems(counts), inflation)
        for name, value in expected.items():
            hits[name] += covered(found[name], value)
    assert min(hits.values()) >= 930, hits
