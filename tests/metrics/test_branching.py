"""Tests of branches against sets of prefixes, for sequences that repeat, extend one another, or are empty."""

import math

import numpy as np
import pytest

from poly_epo_jax.metrics.branching import Segment, active_branches, mean_active_branches, prefix_tree


def generations(*token_ids: list[int]) -> list[np.ndarray]:
    return [np.array(ids, dtype=np.int32) for ids in token_ids]


def random_generations(seed: int) -> list[np.ndarray]:
    """Returns sequences over few tokens, including ids of several bytes. A third are prefixes of another sequence."""
    rng = np.random.default_rng(seed)
    vocabulary = rng.choice([0, 1, 255, 256, 257, 65_536, 151_643], size=rng.integers(1, 4), replace=False)
    found: list[np.ndarray] = []
    for _ in range(rng.integers(0, 12)):
        if found and rng.random() < 0.35:
            other = found[rng.integers(len(found))]
            found.append(other[: rng.integers(0, len(other) + 1)])
        else:
            found.append(rng.choice(vocabulary, size=rng.integers(0, 8)).astype(np.int32))
    return found


def by_hand(token_ids: list[np.ndarray], num_positions: int) -> list[int]:
    return [len({tuple(ids[:h].tolist()) for ids in token_ids if len(ids) >= h}) for h in range(1, num_positions + 1)]


@pytest.mark.parametrize("seed", range(200))
def test_branches_equal_distinct_prefixes(seed):
    token_ids = random_generations(seed)
    longest = max(map(len, token_ids), default=0)
    assert active_branches(token_ids).tolist() == by_hand(token_ids, longest)
    reversed_ids = token_ids[::-1]
    assert active_branches(reversed_ids).tolist() == by_hand(token_ids, longest)


def test_branches_by_hand():
    token_ids = generations([1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 5], [1, 2], [9], [])
    assert active_branches(token_ids).tolist() == [2, 1, 2, 1]


@pytest.mark.parametrize("token_ids", [[], [[]], [[1, 2]], [[1, 2], [1, 2]], [[1, 2], [1, 2, 3], []]])
def test_generations_that_extend_one_another_do_not_branch(token_ids):
    assert (active_branches(generations(*token_ids)) <= 1).all()


def test_ended_problems_count_as_zero_branches():
    problems = [generations([1], [2], [3, 4]), generations([1, 2, 3], [1, 2, 4]), []]
    np.testing.assert_allclose(mean_active_branches(problems), [4 / 3, 2 / 3, 2 / 3])
    assert mean_active_branches([[], generations([])]).shape == (0,)


def test_long_generations():
    """16 generations of 4,096 tokens with a common first half. Then a pair of them branches off every 100 tokens."""
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 150_000, 4096)
    token_ids = []
    for i in range(16):
        own = stem.copy()
        own[2000 + 100 * (i // 2) :] += 1 + i // 2
        token_ids.append(own)
    active = active_branches(token_ids)
    assert active[:2000].tolist() == [1] * 2000
    # Pair i branches off the stem at 2001 + 100 i. After the seventh pair, only the last pair remains on the stem.
    assert active[2000::100][:9].tolist() == [2, 3, 4, 5, 6, 7, 8, 8, 8]


@pytest.mark.parametrize("seed", range(100))
def test_the_tree_contains_all_generations(seed):
    token_ids = random_generations(seed)
    tree = prefix_tree(token_ids)
    for i, ids in enumerate(token_ids):
        own = [segment for segment in tree if i in segment.generations]
        assert [(s.start, s.end) for s in own] == sorted((s.start, s.end) for s in own)
        assert [p for s in own for p in range(s.start, s.end)] == list(range(len(ids)))
        assert [s.parent for s in own] == [None, *(tree.index(s) for s in own[:-1])][: len(own)]
    for segment in tree:
        assert len({tuple(token_ids[i][: segment.end].tolist()) for i in segment.generations}) == 1
    over = [sum(s.start < h <= s.end for s in tree) for h in range(1, max(map(len, token_ids), default=0) + 1)]
    assert over == active_branches(token_ids).tolist()
    # The tree is compressed: a segment has more than one child, unless one of its generations ends with it.
    for number, segment in enumerate(tree):
        children = [s for s in tree if s.parent == number]
        ends = any(len(token_ids[i]) == segment.end for i in segment.generations)
        assert ends or len(children) > 1


def test_the_tree_by_hand():
    assert prefix_tree(generations([1, 2, 3], [1, 2, 4], [1, 2], [5])) == [
        Segment(0, 2, None, (0, 1, 2)),
        Segment(0, 1, None, (3,)),
        Segment(2, 3, 0, (0,)),
        Segment(2, 3, 0, (1,)),
    ]


def test_a_mean_over_no_problems_is_rejected():
    with pytest.raises(ValueError, match="at least one problem"):
        mean_active_branches([])


def test_the_mean_number_of_branches_of_independent_tokens():
    """The expected number of distinct tokens among N uniform samples from V tokens is V (1 - (1 - 1/V)^N)."""
    rng = np.random.default_rng(0)
    problems = [list(rng.integers(0, 5, (4, 1))) for _ in range(4000)]
    expected = 5 * (1 - (1 - 1 / 5) ** 4)
    # The count lies in [1, 4], so its standard deviation is at most 1.5. The tolerance is four standard errors.
    assert abs(mean_active_branches(problems)[0] - expected) < 4 * 1.5 / math.sqrt(4000)
