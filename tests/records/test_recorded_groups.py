"""Tests that recorded generations are validated when they are read as groups."""

import math
from typing import Any

import pytest

from poly_epo_jax.records.recorded_groups import read_generations


def rows(*rewards: Any) -> list[dict[str, Any]]:
    shared = {"problem": "p", "prompt": "?", "response": "a", "correct": True, "cluster": 0}
    return [shared | {"generation": index, "reward": reward} for index, reward in enumerate(rewards)]


@pytest.mark.parametrize("reward", [-5, 1e6, math.nan, math.inf, 10**400])
def test_rewards_outside_of_their_range_are_an_error(reward: Any):
    with pytest.raises(ValueError, match=r"generations of p .* between 0 and 1"):
        read_generations(rows(0.5, reward))


def test_generations_without_a_reward_are_left_out():
    (group,) = read_generations(rows(0, None, 1, 0.25))
    assert group.rewards == (0.0, 1.0, 0.25)
