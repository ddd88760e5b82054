"""Tests of the metrics of a step. The detection of loops is compared with a search over all periods."""

import jax
import numpy as np
import pytest

from poly_epo_jax.step.step_metrics import MIN_LOOP_REPETITIONS, MIN_LOOP_TOKENS, ends_in_loop, step_metrics
from poly_epo_jax.types import Clustering, Generation, GradedGroup, Group, Problem

RNG = np.random.default_rng(0)
TEXT = RNG.integers(0, 1000, 4096).astype(np.int32)


def has_periodic_end(tokens: list[int]) -> bool:
    for period in range(1, len(tokens) + 1):
        length = max(MIN_LOOP_TOKENS, MIN_LOOP_REPETITIONS * period)
        if length <= len(tokens) and all(tokens[i] == tokens[i - period] for i in range(-1, period - length - 1, -1)):
            return True
    return False


def loop(before: int, period: int, tokens: int) -> np.ndarray:
    """Returns `before` random tokens and then `tokens` tokens of a loop."""
    return np.concatenate([TEXT[:before], np.resize(TEXT[-period:], tokens)])


def test_only_the_last_turn_without_its_stop_token_can_be_a_loop():
    """With the stop token, the period of the loop would be interrupted. Replies and earlier turns are not counted."""
    ids = np.append(np.full(64, 5, np.int32), np.int32(1))
    group = Group(Problem("p", "", ""), ids[:1], tuple(_generation(ids, mask) for mask in (0, 1, 30)))
    graded = GradedGroup(group, np.zeros(3, np.float32), np.zeros(3, bool), None)
    assert step_metrics([graded], 1, 2)["response/looped"] == pytest.approx(1 / 3)


def _generation(ids: np.ndarray, reply: int) -> Generation:
    mask = np.arange(len(ids)) >= reply
    return Generation(ids, np.zeros(len(ids), np.float32), mask, ("",), "stop", np.zeros(len(ids), np.int32))


def test_another_number_of_prompts_does_not_compile_again(caplog: pytest.LogCaptureFixture):
    """With train.refill, the number of prompts differs between steps."""
    generations = tuple(_generation(TEXT[:4], 0) for _ in range(4))
    clustering = Clustering(np.array([0, 1, 1, 2]))
    group = Group(Problem("p", "", ""), TEXT[:1], generations)
    graded = GradedGroup(group, np.array([1, 0, 1, 0], np.float32), np.array([1, 0, 1, 0], bool), clustering)
    one = step_metrics([graded], 1, 2)
    with jax.log_compiles():
        assert step_metrics([graded] * 5, 1, 2) == pytest.approx(one)
    assert [record.message for record in caplog.records if "XLA compilation" in record.message] == []


def test_rewards_are_also_logged_by_dataset_if_there_are_several():
    generations = tuple(_generation(TEXT[:4], 0) for _ in range(2))

    def graded(source: str, *rewards: float) -> GradedGroup:
        group = Group(Problem(source, "", "", source=source), TEXT[:1], generations)
        return GradedGroup(group, np.array(rewards, np.float32), np.zeros(2, bool), None)

    groups = [graded("hard", 0, 0.5), graded("easy", 1, 1), graded("hard", 0, 0)]
    found = step_metrics(groups, 1, 2)
    assert {name: value for name, value in found.items() if name.startswith("data/")} == {
        "data/reward/easy": 1,
        "data/reward/hard": 0.125,
    }
    assert not any(name.startswith("data/") for name in step_metrics(groups[1:2], 1, 2))


@pytest.mark.parametrize(("period", "tokens"), [(1, 64), (3, 64), (16, 64), (17, 68), (1000, 4000), (500, 2300)])
def test_a_loop_needs_its_minimum_length(period: int, tokens: int):
    assert ends_in_loop(loop(100, period, tokens)) and ends_in_loop(loop(0, period, tokens))
    assert not ends_in_loop(loop(100, period, tokens - 1 - 300 * (period == 500)))
    assert not ends_in_loop(np.append(loop(100, period, tokens), np.int32(1001)))


def test_text_without_a_loop_at_the_end():
    assert not ends_in_loop(TEXT)
    assert not ends_in_loop(np.append(loop(0, 2, 200), TEXT[:70]))
    for length in (0, 1, 15, 63):
        assert not ends_in_loop(np.zeros(length, np.int32))


def test_all_periods_are_searched():
    found = []
    for _ in range(300):
        alphabet, length = RNG.integers(1, 4), RNG.integers(0, 150)
        period, looped = RNG.integers(1, 40), RNG.integers(0, 150)
        tokens = np.concatenate([RNG.integers(0, alphabet, length), np.resize(RNG.integers(0, 3, period), looped)])
        found.append(ends_in_loop(tokens))
        assert found[-1] == has_periodic_end(tokens.tolist())
    assert 60 < sum(found) < 240


def test_staleness_is_the_age_of_the_weights_of_each_generated_token():
    ids, none = np.zeros(4, np.int32), np.zeros(2, bool)
    generations = [
        Generation(ids, np.zeros(4, np.float32), np.array(mask, bool), ("",), "length", np.array(versions))
        for mask, versions in (([1, 1, 0, 1], [1, 2, 0, 3]), ([1, 1, 1, 1], [3, 3, 4, 4]))
    ]
    graded = GradedGroup(Group(Problem("p", "", ""), ids, tuple(generations)), np.zeros(2, np.float32), none, None)
    metrics = step_metrics([graded], 5, 2)
    assert metrics["response/staleness"] == pytest.approx((3 + 2 + 1 + 1 + 1 + 0 + 0) / 7)
    assert metrics["response/max_staleness"] == 3
