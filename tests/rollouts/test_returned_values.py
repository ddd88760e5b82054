"""Invalid values of tasks, judges and samplers are rejected with the component, the value, the problem and a remedy."""

import asyncio
import math
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fakes import PATIENCE, PROBLEMS, ByLetter, LetterJudge, RandomLetters, group, unchecked
from tiny_training import tiny_config, tiny_experience

from poly_epo_jax.config.keys import JudgeSection
from poly_epo_jax.doctor import servers as doctor_servers
from poly_epo_jax.judges import JUDGES, JudgeEntry, NoJudge
from poly_epo_jax.judges.exact import clusters_of
from poly_epo_jax.judges.llm import LLMJudge
from poly_epo_jax.metrics.logged import LOGGED_METRICS
from poly_epo_jax.parallel import hosts
from poly_epo_jax.rollouts import rounds
from poly_epo_jax.rollouts.grading import cluster_ids, grade_groups
from poly_epo_jax.rollouts.joined_judge import JoinedJudge
from poly_epo_jax.rollouts.returned_values import checked_counts
from poly_epo_jax.startup.read_config import make_judge
from poly_epo_jax.system.daemon_thread import LateCallError
from poly_epo_jax.system.user_code import UserCodeError
from poly_epo_jax.types import Clustering, GradedGroup, Group, Judge, JudgeFailure, Task

RATIONALES = ("One.", "Two.")


def graded(task: Task | None = None, judge: Judge | None = None, texts: str = "ab") -> GradedGroup:
    async def stream() -> AsyncIterator[Group]:
        yield group(PROBLEMS[0], texts)

    grading = grade_groups(stream(), PROBLEMS[:1], task or ByLetter(), judge or LetterJudge())
    return asyncio.run(grading)[0]


class Rewarding(ByLetter):
    """Returns a given value for the letter b."""

    def __init__(self, value: Any):
        self._value = value

    def reward(self, problem, generation) -> Any:
        return self._value if generation.text == "b" else 1.0


class Returning:
    """A judge that returns a given value."""

    def __init__(self, value: Any):
        self._value = value

    async def cluster(self, group: Group) -> Any:
        return self._value


def clustering(ids: Any, rationales: Any = None, features: Any = {}) -> Clustering:  # noqa: B006
    return unchecked(Clustering, ids=ids, rationales=rationales, features=features)


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, -math.inf, 1.001, -1e-9, 1e300, 10**400, None, "1", True, [1.0], {"score": 1.0}, 1j),
        *(np.True_, np.array([1.0]), np.float64(math.nan), np.str_("1"), jnp.array(True), b"1"),
    ],
    ids=repr,
)
def test_rewards_that_are_no_numbers_from_0_to_1_are_rejected(value: Any):
    with pytest.raises(ValueError, match=r"^Rewarding\.reward returned .* for problem 'p', .* from 0 to 1; return"):
        graded(Rewarding(value))


def test_the_message_shows_the_reward_and_its_type():
    with pytest.raises(ValueError, match=re.escape("Rewarding.reward returned '1' (str) for problem 'p'")):
        graded(Rewarding("1"))
    with pytest.raises(ValueError, match=re.escape("returned array([1.]) (float64 array of shape (1,)) for")):
        graded(Rewarding(np.array([1.0])))


class Third(float):
    pass


@pytest.mark.parametrize(
    "value",
    [Third(1 / 3), np.float32(1 / 3), np.float16(1 / 3), np.array(1 / 3), jnp.float32(1 / 3), 0, 1],
    ids=repr,
)
def test_rewards_can_be_any_real_number(value: Any):
    rewards = graded(Rewarding(value)).rewards
    assert rewards.dtype == np.float32 and rewards.tolist() == [1.0, np.float32(float(value))]


def test_rewards_may_exceed_1_by_a_rounding_error():
    assert graded(Rewarding(math.nextafter(1.0, 2.0))).rewards.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", ["0.5", math.nan, 2, True, None])
def test_the_minimum_reward_of_a_correct_response_is_checked(value: Any):
    class Lenient(ByLetter):
        correct_from: Any = value

    with pytest.raises(ValueError, match=rf"Lenient\.correct_from is {value!r} .* from 0 to 1"):
        graded(Lenient())


def test_rewards_at_the_minimum_are_correct():
    class Lenient(ByLetter):
        correct_from = np.float64(0.7)

    class Tenths(Lenient):
        def reward(self, problem, generation) -> float:
            return {"a": 0.7, "b": 0.6}[generation.text]

    assert graded(Tenths()).correct.tolist() == [True, False]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (clustering([0, 1]), r"its ids are \[0, 1\] \(list\); return an int32 array .* each of the 2 responses"),
        (clustering((0, 1)), r"its ids are \(0, 1\) \(tuple\)"),
        (clustering(np.array([0.0, 1.0])), r"its ids are .*\(float64 array of shape \(2,\)\)"),
        (clustering(np.array([True, False])), r"bool array"),
        (clustering(np.array(["a", "b"])), "its ids are"),
        (clustering(np.array([0, None])), "object array"),
        (clustering(np.array([0])), r"shape \(1,\)\); .* each of the 2 responses"),
        (clustering(np.array([[0, 1]])), r"shape \(1, 2\)"),
        (clustering(np.array(0)), "its ids are"),
        (clustering(np.array([0, 2**32 + 100])), "4294967396.* int32"),
        (clustering(np.array([0, 2**64 - 1], np.uint64)), "int32"),
        (clustering(np.array([-(2**31) - 1, 0])), "int32"),
        (clustering(None), r"its ids are None \(NoneType\)"),
        (clustering(np.arange(2), "ab"), r"its rationales are 'ab' \(str\); .* each of the 2 responses"),
        (clustering(np.arange(2), ["One."]), "its rationales are"),
        (clustering(np.arange(2), ["One.", None]), "its rationales are"),
        (clustering(np.arange(2), ("One.", {"text": "Two."})), "its rationales are"),
        (clustering(np.arange(2), features=None), "its features are None .* dict of arrays"),
        (clustering(np.arange(2), features={"x": np.array([0.0, np.inf])}), "its feature 'x' is .*finite"),
        (clustering(np.arange(2), features={"x": np.zeros((3, 2))}), r"'x' is .*shape \(3, 2\)\); .* 2 responses"),
        (clustering(np.arange(2), features={"x": 1.0}), "its feature 'x' is 1.0"),
        (clustering(np.arange(2), features={"x": [[1.0], [1.0, 2.0]]}), "its feature 'x' is"),
        (clustering(np.arange(2), features={"x": np.array(["a", "b"])}), "its feature 'x' is"),
        (None, r"it is None \(NoneType\); return a Clustering"),
        (np.arange(2), r"it is array\(\[0, 1\]\) .*; return a Clustering"),
        ({"ids": [0, 1]}, r"it is .*\(dict\); return a Clustering"),
        (("raised", "text"), r"it is .*\(tuple\); return a Clustering"),
        (unchecked(JudgeFailure, kind=["broken"], reason=None), r"\['broken'\] \(list\) and None .*use strings"),
    ],
    ids=str,
)
def test_invalid_results_of_a_judge_are_rejected(returned: Any, words: str):
    with pytest.raises(ValueError, match=rf"^Returning\.cluster returned an .* for problem 'p': .*{words}"):
        graded(judge=Returning(returned))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_ids_can_have_any_integer_type(dtype: Any):
    returned = clustering(np.array([3, 100], dtype), list(RATIONALES), {"x": [[1], [2]], "y": jnp.ones((2, 3))})
    one = graded(judge=Returning(returned))
    assert one.clustering is returned and cluster_ids([one])[0].tolist() == [3, 100]


@pytest.mark.parametrize("returned", [JudgeFailure("broken", "out of order"), clustering(jnp.arange(2))])
def test_failures_and_jax_arrays_are_valid(returned: Any):
    assert graded(judge=Returning(returned)).clustering is returned


def test_judges_that_do_not_cluster_may_return_none(monkeypatch: pytest.MonkeyPatch):
    class Silent(Returning):
        pass

    monkeypatch.setitem(JUDGES, "silent", JudgeEntry(lambda task, section: Silent(None), "nothing", clusters=False))
    judge = make_judge(JudgeSection(name="silent"), ByLetter())
    for one in (judge, NoJudge(), JoinedJudge(judge, LetterJudge())):
        assert graded(judge=one).clustering is None


def test_the_doctor_checks_the_result_of_the_judge():
    with pytest.raises(
        ValueError, match=r"^Returning\.cluster returned .* problem 'doctor': its ids are \[0, 0, 1, 2\]"
    ):
        asyncio.run(doctor_servers._cluster(Returning(clustering([0, 0, 1, 2])), doctor_servers.GROUP))


COUNTED = np.arange(101)
OTHERS = np.where(COUNTED < 99, COUNTED, COUNTED + 2)


def test_ids_that_count_up_to_100_are_rejected():
    """100 marks degenerate responses, so a judge that counts up would discard its hundredth cluster."""
    with pytest.raises(ValueError, match=r"both 99 and 100.* reserved for degenerate .*exact\.clusters_of"):
        graded(judge=Returning(clustering(COUNTED)), texts="a" * 101)
    with pytest.raises(ValueError, match="both 99 and 100"):
        graded(judge=Returning(clustering(np.array([99, 100]))))
    for valid in (OTHERS, np.where(OTHERS == 5, 100, OTHERS), np.where(COUNTED == 99, 98, COUNTED)):
        assert graded(judge=Returning(clustering(valid)), texts="a" * 101).clustering is not None


def test_clusters_of_never_returns_99():
    keys = [None if i == 7 else i for i in range(300)]
    one = graded(judge=Returning(clusters_of(keys)), texts="a" * 300)
    (ids,) = cluster_ids([one])
    assert ids.tolist() == [*range(7), 100, *range(7, 99), *range(101, 301)]


def test_99_and_100_of_a_language_model_are_valid(monkeypatch: pytest.MonkeyPatch):
    """Its replies are validated by their schema, which allows 1 to 99, and 100 for degenerate responses."""
    ids = np.array([*range(2, 100), 100], np.int32)
    judge = LLMJudge(ByLetter(), JudgeSection(name="llm", url="http://localhost"))

    async def cluster(group: Group) -> Clustering:
        return Clustering(ids)

    monkeypatch.setattr(judge, "cluster", cluster)
    assert cluster_ids([graded(judge=judge, texts="a" * 99)])[0].tolist() == ids.tolist()


class Counts:
    """A component whose `metrics` method returns a given value."""

    def __init__(self, value: Any):
        self._value = value

    def metrics(self) -> Any:
        return self._value


class CountingTask(Counts, ByLetter):
    pass


class CountingJudge(Counts, LetterJudge):
    def __init__(self, value: Any):
        super().__init__(value)
        self.failing = ()


class CountingSampler(Counts, RandomLetters):
    def __init__(self, value: Any):
        super().__init__(value)
        RandomLetters.__init__(self)


def counts(of_task: Any, of_judge: Any = {}, of_sampler: Any = {}) -> dict[str, float]:  # noqa: B006
    components = CountingSampler(of_sampler), CountingTask(of_task), CountingJudge(of_judge)
    experience = tiny_experience(tiny_config(), *components)

    async def batch() -> dict[str, float]:
        return (await experience.batch(1, 0)).counts

    return asyncio.run(batch())


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned None .*return a dict"),
        ([("task/x", 1.0)], r"returned .*\(list\); return a dict"),
        ({"task/x": "1"}, r"returned '1' \(str\) for 'task/x'; return finite numbers or NaN"),
        ({"task/x": True}, "returned True .* 'task/x'"),
        ({"task/x": [1.0]}, r"returned \[1.0\] \(list\) for 'task/x'"),
        ({"task/x": 10**400}, "returned 1000.* 'task/x'"),
        ({"task/x": math.inf}, "returned inf .* 'task/x'"),
        ({1: 1.0}, "returned 1.0 .* for 1; .*strings as names"),
        *(
            ({name: 1.0}, rf"returned '{name}', which is the name of another metric.* 'CountingTask/")
            for name in (
                "step",
                "reward",
                "solved",
                "clusters/synergy",
                "eval/reward",
                "eval/mine",
                "policy/loss",
                "policy/mine",
            )
        ),
        *(
            ({name: 1.0}, rf"returned '{name}', which")
            for name in (
                "judge/failed/timeout",
                "seconds/mine",
                "exclusive_seconds/grade",
                "tokens_per_second",
                "clusters/correct",
            )
        ),
    ],
    ids=str,
)
def test_invalid_counters_are_rejected(returned: Any, words: str):
    with pytest.raises(ValueError, match=rf"^CountingTask\.metrics {words}"):
        counts(returned)


def test_counters_of_two_components_must_have_different_names():
    with pytest.raises(ValueError, match=r"^CountingJudge\.metrics returned 'task/x', which is the name of another"):
        counts({"task/x": 1.0}, {"task/x": 2.0})


def test_counters_are_numbers_or_nan(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(LOGGED_METRICS, "task/mine", LOGGED_METRICS["reward"])  # an entry does not reserve a name
    valid = {"task/mine": np.float32(0.5), "grader/timeouts": 2, "task/y": math.nan, "mine": np.array(3)}
    found = counts(valid, {"judge/retries": 1.0, "judge/mine": -1e300}, {"rollouts/resampled": 3.0})
    assert math.isnan(found.pop("task/y"))
    of_batch = {"data/drawn": 3, "data/with_signal": 3, "data/without_signal": 0, "data/discarded": 0}
    assert found == of_batch | {
        "task/mine": 0.5,
        "grader/timeouts": 2,
        "mine": 3,
        "judge/retries": 1.0,
        "judge/mine": -1e300,
        "rollouts/resampled": 3.0,
    }


def test_counters_that_some_processes_do_not_report_are_0():
    shares = [{"task/x": 1.0}, {"task/x": 2.0, "task/y": 3.0}]
    assert hosts.total(shares) == hosts.total(shares[::-1]) == {"task/x": 3.0, "task/y": 3.0}


def test_counters_that_raise_name_the_line():
    class Broken(CountingTask):
        def metrics(self) -> Any:
            return {}["count"]

    line = Broken.metrics.__code__.co_firstlineno + 1
    with pytest.raises(
        UserCodeError, match=rf"^Broken\.metrics raised KeyError at {re.escape(__file__)}:{line}: 'count'\."
    ):
        asyncio.run(checked_counts(Broken({})))


class Waiting(CountingTask):
    """A task whose `metrics` waits for an event."""

    def __init__(self):
        super().__init__({})
        self.event = threading.Event()

    def metrics(self) -> Any:
        assert self.event.wait(PATIENCE)
        return {"task/x": 1.0}


def test_counters_that_do_not_return_raise_an_error():
    task = Waiting()
    limit = r"^Waiting\.metrics did not return within rollouts\.grading_timeout_seconds=0\.01"
    with pytest.raises(LateCallError, match=limit):
        asyncio.run(checked_counts(task, timeout_seconds=0.01))
    task.event.set()


def test_counters_that_take_time_do_not_block_the_event_loop():
    async def count(task: Waiting) -> dict[str, float]:
        asyncio.get_running_loop().call_later(0.01, task.event.set)
        return await checked_counts(task)

    assert asyncio.run(count(Waiting())) == {"task/x": 1.0}


def test_the_counters_of_a_round_have_the_time_limit_of_the_configuration(monkeypatch: pytest.MonkeyPatch):
    async def late(*components: Any, timeout_seconds: float) -> dict[str, float]:
        raise LateCallError(f"after {timeout_seconds} s")

    monkeypatch.setattr(rounds, "checked_counts", late)
    experience = tiny_experience(tiny_config())
    experience.rollouts.grading_timeout_seconds = 7.0
    with pytest.raises(LateCallError, match=r"^after 7\.0 s"):
        asyncio.run(experience.batch(1, 0))
