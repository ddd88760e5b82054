"""Tests of joined partitions, against the transitive closure of the pairs that either judge joins."""

import asyncio
import itertools

import numpy as np
import pytest
from fakes import PROBLEMS

from poly_epo_jax.judges.joined import JoinedJudge
from poly_epo_jax.types import DEGENERATE_CLUSTER, Clustering, Generation, Group, JudgeFailure

ARRAYS = np.zeros(1, np.int32), np.zeros(1, np.float32), np.ones(1, bool)


class Fixed:
    def __init__(self, found: Clustering | JudgeFailure):
        self._found = found

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        return self._found

    def metrics(self) -> dict[str, float]:
        return {"judge/retries": 2.0}

    async def identity(self) -> dict[str, str]:
        return {"judge.model": "m"}


def join(*judges: Fixed) -> Clustering | JudgeFailure | None:
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
    ids = rng.choice([0, 1, 2, 3, 4, 99, DEGENERATE_CLUSTER], (2, 6)).astype(np.int32)
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
