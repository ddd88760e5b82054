"""Tests of joined partitions, against the transitive closure of the pairs that either judge joins."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import numpy as np
import pytest
from fakes import PROBLEMS, ByLetter, group

from poly_epo_jax.rollouts.grading import grade_groups
from poly_epo_jax.rollouts.joined_judge import JoinedJudge
from poly_epo_jax.types import DEGENERATE_CLUSTER, Clustering, Generation, Group, Judge, JudgeFailure

ARRAYS = np.zeros(1, np.int32), np.zeros(1, np.float32), np.ones(1, bool)


class Fixed:
    def __init__(self, found: Clustering | JudgeFailure | None):
        self._found = found

    async def cluster(self, group: Group) -> Clustering | JudgeFailure | None:
        return self._found

    def metrics(self) -> dict[str, float]:
        return {"judge/retries": 2.0}

    async def identity(self) -> dict[str, str]:
        return {"judge.model": "m"}


def join(*judges: Judge) -> Clustering | JudgeFailure | None:
    generations = tuple(Generation(*ARRAYS, ("",), "stop", np.zeros(1, int)) for _ in range(6))
    return asyncio.run(JoinedJudge(*judges).cluster(Group(PROBLEMS[0], ARRAYS[0], generations)))


def closure(first: np.ndarray, second: np.ndarray) -> set[frozenset[int]]:
    """Returns the clusters without the degenerate one, by repeated merging."""
    kept = [i for i in range(len(first)) if DEGENERATE_CLUSTER not in (first[i], second[i])]
    clusters = [{i} for i in kept]
    for i, j in itertools.permutations(kept, 2):
        if first[i] == first[j] or second[i] == second[j]:
            one, other = (next(c for c in clusters if k in c) for k in (i, j))
            if one is not other:
                clusters = [c for c in clusters if c is not one and c is not other] + [one | other]
    return set(map(frozenset, clusters))


@pytest.mark.parametrize("seed", range(20))
def test_the_join_is_the_transitive_closure(seed: int):
    rng = np.random.default_rng(seed)
    ids = rng.choice([0, 1, 2, 3, 4, 98, DEGENERATE_CLUSTER], (2, 6)).astype(np.int32)
    found = join(*(Fixed(Clustering(one)) for one in ids))
    assert isinstance(found, Clustering)
    groups = {
        frozenset(np.flatnonzero(found.ids == one).tolist()) for one in {*found.ids.tolist()} - {DEGENERATE_CLUSTER}
    }
    assert groups == closure(*ids)


def test_a_failure_of_either_judge_is_a_failure_and_counters_are_summed():
    failure, clustering = JudgeFailure("malformed", "no"), Clustering(np.arange(6, dtype=np.int32))
    for judges in ((Fixed(failure), Fixed(clustering)), (Fixed(clustering), Fixed(failure))):
        assert join(*judges) is failure
        assert JoinedJudge(*judges).metrics() == {"judge/retries": 4.0}
        assert asyncio.run(JoinedJudge(*judges).identity()) == {"judge.model": "m", "audit.judge.model": "m"}


@pytest.mark.parametrize(
    ("invalid", "text"),
    [
        (Clustering(np.zeros(1, np.int32)), "one id for each of the 6 responses"),
        (Clustering(np.arange(95, 101, dtype=np.int32)), "both 99 and 100"),
        (None, "return a Clustering"),
    ],
)
def test_each_partition_is_checked_before_the_join(invalid: Clustering | None, text: str):
    """The error is not a failure of the judge, so `grade_groups` raises it."""
    judges = Fixed(Clustering(np.arange(6, dtype=np.int32))), Fixed(invalid)
    generations = group(PROBLEMS[0], "aaaaaa")

    async def stream() -> AsyncIterator[Group]:
        yield generations

    for joined in (JoinedJudge(*judges), JoinedJudge(*reversed(judges))):
        with pytest.raises(ValueError, match=rf"^Fixed\.cluster returned an invalid result for problem 'p': .*{text}"):
            asyncio.run(grade_groups(stream(), PROBLEMS[:1], ByLetter(), joined))
