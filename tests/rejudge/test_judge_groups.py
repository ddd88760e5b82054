"""Tests of the requests to judges: orders, seeds, interruptions, and results computed by hand."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fakes import LETTERS

from poly_epo_jax.config.keys import Config
from poly_epo_jax.judges.variants import FIRST, Variant, permutation, variants
from poly_epo_jax.metrics.agreement import adjusted_rand_index
from poly_epo_jax.records.recorded_groups import RecordedGroup
from poly_epo_jax.rejudge.judges import CLUSTERINGS, judge_groups, read_clusterings, timing_summary
from poly_epo_jax.rejudge.results import advantages_of, clusters_in, compare, judge_results
from poly_epo_jax.set_rl import polychromic_advantages
from poly_epo_jax.types import DEGENERATE_CLUSTER, Clustering, Group, Judge, JudgeFailure, Problem

WANTED = variants(num_seeds=2, num_orders=3)


def recorded(name: str, texts: str, rewards: Sequence[float] = ()) -> RecordedGroup:
    """Returns a group with a response for each letter of a text."""
    given = tuple(map(float, rewards)) or (0.0,) * len(texts)
    return RecordedGroup(name, Problem(name, f"{name}:", ""), tuple(texts), given, tuple(one == 1 for one in given))


GROUPS = [recorded(f"problem {i}", "".join(LETTERS[(i * j) % 4] for j in range(8))) for i in range(6)]


class Letters:
    """Clusters responses by letter, with a rationale for each."""

    requests = 0

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        self.requests += 1
        texts = [generation.text for generation in group.generations]
        return Clustering(np.array([LETTERS.index(text) for text in texts]), tuple(f"is {text}" for text in texts))

    def metrics(self) -> dict[str, float]:
        return {"judge/tokens": 10.0}


class Halves(Letters):
    """Assigns the first and the last four responses to two clusters, regardless of their texts."""

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        return Clustering(np.arange(8) // 4)


class Seeded(Letters):
    """Joins all responses with seed 0, and separates them with other seeds."""

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        return Clustering(np.arange(8) * min(int(group.generations[0].weight_versions[0]), 1))


class Fails(Letters):
    """Fails for one problem."""

    def __init__(self, kind: str):
        self._kind = kind

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        is_failure = group.problem.id == "problem 2"
        return JudgeFailure(self._kind, "Out of order.") if is_failure else await super().cluster(group)


class Stops(Letters):
    """Fails after a number of requests."""

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        if self.requests == 7:
            raise ConnectionError("the server failed")
        return await super().cluster(group)


def request(folder: Path, judge: Judge, wanted: Sequence[Variant] = WANTED) -> list[int]:
    """Requests clusterings of GROUPS, and returns the numbers of completed requests."""
    folder.mkdir(exist_ok=True)
    shown: list[int] = []
    asyncio.run(judge_groups(folder, judge, GROUPS, wanted, 4, shown.append))
    return shown


def test_a_judge_that_depends_on_the_order_is_sensitive_and_others_are_not(tmp_path: Path):
    found = {}
    for judge in (Letters(), Halves(), Seeded()):
        request(tmp_path / type(judge).__name__, judge)
        found[type(judge)] = judge_results(read_clusterings(tmp_path / type(judge).__name__), WANTED)
    assert found[Letters]["order_sensitivity"]["mean"] == 0 == found[Seeded]["order_sensitivity"]["mean"]
    assert found[Halves]["order_sensitivity"]["mean"] > 0.5
    assert found[Letters]["seed_agreement"]["mean"] == 1 == found[Halves]["seed_agreement"]["mean"]
    assert found[Seeded]["seed_agreement"]["mean"] == 0


def test_clusters_and_rationales_are_stored_in_the_recorded_order(tmp_path: Path):
    request(tmp_path, Letters())
    for of_variant in read_clusterings(tmp_path).values():
        for group in GROUPS:
            assert of_variant[group.name]["clusters"] == [LETTERS.index(text) for text in group.responses]
            assert of_variant[group.name]["rationales"] == [f"is {text}" for text in group.responses]


@pytest.mark.parametrize("num_responses", [2, 3, 8])
def test_orders_are_permutations_and_only_order_0_is_the_recorded_one(num_responses: int):
    for order in range(30):
        found = permutation("a problem", order, num_responses).tolist()
        assert sorted(found) == list(range(num_responses))
        assert (found == list(range(num_responses))) == (order == 0)
    assert permutation("a problem", 1, 8).tolist() != permutation("another", 1, 8).tolist()


def test_an_interrupted_command_resumes_and_writes_the_same_file(tmp_path: Path):
    assert request(tmp_path / "whole", Letters()) == list(range(25))
    with pytest.raises(ConnectionError):
        request(tmp_path / "broken", Stops())
    path, whole = (tmp_path / name / CLUSTERINGS for name in ("broken", "whole"))
    with path.open("a") as file:
        file.write('{"clusters": [0, 1')  # killed while it wrote
    num_complete = len(path.read_text().splitlines()) - 1
    judge = Letters()
    assert 0 < num_complete == request(tmp_path / "broken", judge)[0] and judge.requests == 24 - num_complete
    assert path.read_bytes() == whole.read_bytes()
    assert request(tmp_path / "broken", Stops()) == [24]  # nothing is requested
    assert timing_summary(tmp_path / "broken")["judge/tokens"] == 240


def test_more_seeds_and_orders_only_request_the_missing_clusterings(tmp_path: Path):
    request(tmp_path, Letters(), [FIRST])
    assert request(tmp_path, Letters())[0] == len(GROUPS)


def test_failures_are_counted_and_requests_without_a_reply_are_repeated(tmp_path: Path):
    for kind, remaining in (("malformed", 24), ("unreachable", 20)):
        request(tmp_path / kind, Fails(kind))
        found = judge_results(read_clusterings(tmp_path / kind), WANTED)
        assert found["failures"] == {kind: 1} and found["num_problems"] == 6
        assert found["valid"]["mean"] == pytest.approx(5 / 6) and found["clusters"]["num_problems"] == 5
        assert request(tmp_path / kind, Letters())[0] == remaining


def test_results_equal_those_computed_by_hand(tmp_path: Path):
    ids = {"p": [0, 0, 1, 2], "q": [0, DEGENERATE_CLUSTER, DEGENERATE_CLUSTER, 3]}
    rows = {name: {"clusters": clusters, "failure": None} for name, clusters in ids.items()}
    found = judge_results({FIRST: rows}, [FIRST])
    assert found["degenerate"]["mean"] == 0.25 and found["clusters"]["mean"] == 2.5
    assert found["seed_agreement"] is None is found["order_sensitivity"]


def test_judges_are_compared_on_the_problems_that_all_of_them_clustered():
    first = {"p": np.array([0, 0, 1, 1]), "q": np.array([0, 0, 100, 100]), "r": np.array([0, 0, 0, 1])}
    second = {"p": np.array([0, 0, 1, 2]), "q": np.array([0, 0, 100, 100])}
    reference = {"q": np.array([0, 0, 1, 1]), "r": np.array([0, 0, 1, 1])}
    found = compare({"a": first, "b": second}, reference, None)
    assert found["num_shared"] == 2
    ab, a, b = found["pairs"]
    assert (ab["first"], ab["second"], ab["num_problems"]) == ("a", "b", 2)
    assert ab["adjusted_rand_index"]["mean"] == pytest.approx((4 / 7 + 1) / 2)
    assert ab["v_measure"]["mean"] == pytest.approx((4 / 5 + 1) / 2)
    # Degenerate responses are separate, so q is 0 0 1 2, and the reference joins two pairs.
    assert (a["second"], a["num_problems"]) == ("reference", 1)
    assert a["adjusted_rand_index"]["mean"] == b["adjusted_rand_index"]["mean"] == pytest.approx(4 / 7)
    assert "sign_changes" not in ab


def test_a_judge_as_reference_is_in_every_pair():
    ids = {"p": np.array([0, 0, 1])}
    found = compare(dict.fromkeys("abc", ids), "b", None)["pairs"]
    assert [(pair["first"], pair["second"]) for pair in found] == [("a", "b"), ("b", "c")]


def test_the_effect_on_advantages():
    groups = [recorded("p", "abcde", [1, 1, 1, 0, 0]), recorded("q", "abcde", [0] * 5)]
    advantages = advantages_of(Config(), groups)
    assert advantages is not None
    ids = {"p": np.array([0, 0, 1, 2, 2]), "q": np.array([0, 1, 2, 3, 4])}
    expected = np.asarray(polychromic_advantages(np.array([groups[0].rewards], np.float32), ids["p"][None], 4))[0]
    assert advantages("p", ids["p"]) == pytest.approx(expected, abs=1e-6)
    same = compare({"a": ids, "b": ids}, None, advantages)["pairs"][0]
    assert same["rank_correlation"] == {"mean": pytest.approx(1), "low": None, "high": None, "num_problems": 1}
    assert same["sign_changes"]["mean"] == 0 and same["sign_changes"]["num_problems"] == 2
    other = ids | {"p": np.array([0, 1, 1, 2, 2])}
    changed = compare({"a": ids, "b": other}, None, advantages)["pairs"][0]
    signs = [np.sign(np.round(advantages("p", judged["p"]), 6)) for judged in (ids, other)]
    assert changed["sign_changes"]["mean"] == pytest.approx(np.mean(signs[0] != signs[1]) / 2)
    assert changed["rank_correlation"]["mean"] < 1
    assert adjusted_rand_index(ids["p"], other["p"]) < 1


def test_rows_without_clusters_are_left_out():
    assert list(clusters_in({"p": {"clusters": None}, "q": {"clusters": [1, 2]}})) == ["q"]
