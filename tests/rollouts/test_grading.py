"""Tests that groups are graded and judged while others are still being generated."""

import asyncio
import dataclasses
import itertools
import json
import re
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from fakes import PATIENCE, PROBLEMS, ByLetter, LetterJudge, group
from simulated_time import SimulatedTime

from poly_epo_jax.judges.answer import AnswerJudge
from poly_epo_jax.judges.exact import ExactJudge
from poly_epo_jax.records.timeline import StageClock
from poly_epo_jax.rollouts import grading
from poly_epo_jax.rollouts.grading import (
    MAX_ABANDONED,
    EpisodeError,
    JudgeError,
    check_failed_environments,
    check_failed_fraction,
    cluster_ids,
    complete_groups,
    grade_groups,
    left_out_groups,
    usable_groups,
)
from poly_epo_jax.rollouts.joined_judge import JoinedJudge
from poly_epo_jax.system.pending_calls import pending_calls
from poly_epo_jax.types import (
    DEGENERATE_CLUSTER,
    Clustering,
    Generation,
    GradedGroup,
    Group,
    Judge,
    JudgeFailure,
    Problem,
)


async def stream(groups: Sequence[Group]) -> AsyncIterator[Group]:
    for one in groups:
        yield one


def test_results_have_the_order_of_the_problems():
    groups = [group(PROBLEMS[i], texts) for i, texts in ((2, "ab"), (0, "ca"), (1, "dd"))]
    graded = asyncio.run(grade_groups(stream(groups), PROBLEMS, ByLetter(), LetterJudge()))
    assert [one.group for one in graded] == [groups[1], groups[2], groups[0]]
    np.testing.assert_array_equal([one.rewards for one in graded], [[0, 1], [0, 0], [1, 0]])
    np.testing.assert_array_equal(cluster_ids(graded), [[2, 0], [3, 3], [0, 1]])
    assert {one.rewards.dtype for one in graded} == {np.dtype(np.float32)}


def test_a_repeated_problem_has_two_results():
    problems = [PROBLEMS[1], PROBLEMS[0], dataclasses.replace(PROBLEMS[1], occurrence=1)]
    groups = [group(problem, texts) for problem, texts in zip(problems, ("ab", "ca", "dd"), strict=True)]
    for arrived in itertools.permutations(groups):
        graded = asyncio.run(grade_groups(stream(arrived), problems, ByLetter(), LetterJudge()))
        assert [one.group for one in graded] == groups


def test_grading_overlaps_generation():
    """Each group is generated only after the previous one has been judged, which would deadlock without overlap."""

    async def main() -> list[str]:
        was_judged = {problem.id: asyncio.Event() for problem in PROBLEMS}
        happened, loop = [], asyncio.get_running_loop()

        async def generate() -> AsyncIterator[Group]:
            for problem in PROBLEMS:
                happened.append(f"generate {problem.id}")
                yield group(problem, "ab")
                await was_judged[problem.id].wait()

        class Watched(LetterJudge):
            async def cluster(self, group: Group):
                happened.append(f"judge {group.problem.id}")
                loop.call_soon_threadsafe(was_judged[group.problem.id].set)  # judges have a separate loop
                return await super().cluster(group)

        await asyncio.wait_for(grade_groups(generate(), PROBLEMS, ByLetter(), Watched()), timeout=PATIENCE)
        return happened

    assert asyncio.run(main()) == [f"{verb} {problem.id}" for problem in PROBLEMS for verb in ("generate", "judge")]


def test_an_error_ends_the_generation():
    async def main() -> list[str]:
        happened, was_raised = [], asyncio.Event()

        async def generate() -> AsyncIterator[Group]:
            try:
                for problem in PROBLEMS:
                    yield group(problem, "ab")
                    await was_raised.wait()
                    happened.append(problem.id)
            finally:
                happened.append("closed")

        async def write(graded: GradedGroup) -> None:
            was_raised.set()
            raise OSError("the disk is full")

        with pytest.raises(OSError, match="the disk is full"):
            await grade_groups(generate(), PROBLEMS, ByLetter(), LetterJudge(), write)
        return happened

    assert asyncio.run(main()) == [PROBLEMS[0].id, "closed"]


def test_groups_are_judged_concurrently():
    """Each call of the judge waits until all calls have started."""

    async def main() -> None:
        barrier = asyncio.Barrier(len(PROBLEMS))

        class Patient(LetterJudge):
            async def cluster(self, group: Group):
                await barrier.wait()
                return await super().cluster(group)

        groups = [group(problem, "ab") for problem in PROBLEMS]
        await asyncio.wait_for(grade_groups(stream(groups), PROBLEMS, ByLetter(), Patient()), timeout=PATIENCE)

    asyncio.run(main())


def test_judge_failures_keep_their_reason_and_are_excluded():
    groups = [group(problem, "ab") for problem in PROBLEMS]
    graded = asyncio.run(grade_groups(stream(groups), PROBLEMS, ByLetter(), LetterJudge(failing=["q"])))
    assert graded[1].clustering == JudgeFailure("broken", "out of order")
    check_failed_fraction(graded, max_failed_fraction=0.34)
    with pytest.raises(JudgeError, match=r"failed on 1 of 3 prompts, .*=0\.33 .* broken \(1 times\)"):
        check_failed_fraction(graded, max_failed_fraction=0.33)
    np.testing.assert_array_equal(graded[1].rewards, [1, 0])

    judged = [graded[0], graded[2]]
    assert usable_groups(graded, True, "drop") == usable_groups(graded, True, "drop_always") == judged
    assert usable_groups(graded, False, "drop_always") == judged
    assert usable_groups(graded, False, "drop") == usable_groups(graded, False, "distinct") == graded

    first, failed, last = usable_groups(graded, True, "distinct")
    assert [first, last] == judged and failed.group is graded[1].group
    np.testing.assert_array_equal(cluster_ids([failed]), [[0, 1]])
    assert graded[1].clustering == JudgeFailure("broken", "out of order")


def test_distinct_clusters_are_strategies_for_any_number_of_responses():
    (graded,) = asyncio.run(
        grade_groups(stream([group(PROBLEMS[0], "a" * 120)]), PROBLEMS[:1], ByLetter(), LetterJudge([PROBLEMS[0].id]))
    )
    (ids,) = cluster_ids(usable_groups([graded], True, "distinct"))
    assert len(set(ids.tolist())) == 120 and DEGENERATE_CLUSTER not in ids


def test_the_task_determines_which_rewards_are_correct():
    class Tenths(ByLetter):
        def reward(self, problem: Problem, generation: Generation) -> float:
            return {"a": 1.0, "b": 0.7, "c": 0.6, "d": 0.0}[generation.text]

    class Lenient(Tenths):
        correct_from = 0.7

    for task, expected in ((Tenths(), [True, False, False, False]), (Lenient(), [True, True, False, False])):
        groups = stream([group(PROBLEMS[0], "abcd")])
        (graded,) = asyncio.run(grade_groups(groups, PROBLEMS[:1], task, LetterJudge()))
        assert graded.correct.tolist() == expected and graded.correct.dtype == bool


def test_rewards_and_judges_are_pending_calls():
    class Watched(ByLetter):
        def reward(self, problem: Problem, generation: Generation) -> float:
            seen.append(pending_calls()[0])
            return super().reward(problem, generation)

    class WatchedJudge(LetterJudge):
        async def cluster(self, group: Group):
            seen.append(pending_calls()[0])
            return await super().cluster(group)

    seen: list[str] = []
    asyncio.run(grade_groups(stream([group(PROBLEMS[0], "a")]), PROBLEMS[:1], Watched(), WatchedJudge()))
    assert len(seen) == 2 and "Watched.reward of problem 'p'" in seen[0] + seen[1]
    assert "WatchedJudge.cluster of problem 'p'" in seen[0] + seen[1] and not pending_calls()[0]


def test_a_reward_that_raises_masks_its_response(capsys: pytest.CaptureFixture[str]):
    class Fragile(ByLetter):
        def reward(self, problem: Problem, generation: Generation) -> float:
            return 1 / (generation.text != "b")

    class Watching(LetterJudge):
        async def cluster(self, group: Group) -> Clustering | JudgeFailure:
            seen.append([y.text for y in group.generations])
            return await super().cluster(group)

    seen: list[list[str]] = []
    groups = [group(problem, texts) for problem, texts in zip(PROBLEMS, ("abcb", "bab", "ac"), strict=True)]
    graded = asyncio.run(grade_groups(stream(groups), PROBLEMS, Fragile(), Watching(), min_group=2))
    assert [one.group.indices for one in graded] == [[0, 2], [1], [0, 1]]
    assert [list(one.group.failures) for one in graded] == [[1, 3], [0, 2], []]
    assert [one.rewards.tolist() for one in graded] == [[1.0, 1.0], [], [1.0, 1.0]]
    assert seen == [["a", "c"], ["a", "c"]] and [len(ids) for ids in cluster_ids(graded)] == [2, 2]
    assert complete_groups(graded) == [graded[0], graded[2]] and left_out_groups(graded) == [graded[1]]
    check_failed_environments(graded, 0.34)
    with pytest.raises(EpisodeError, match=r"failed on 1 of 3 prompts, .*=0\.33 .* raised \(2 times\)"):
        check_failed_environments(graded, 0.33)

    line = Fragile.reward.__code__.co_firstlineno + 1
    reason = rf"Fragile\.reward raised ZeroDivisionError for problem 'p' at {re.escape(__file__)}:{line}: [a-z ]*\."
    failure = graded[0].group.failures[3]
    assert failure.kind == "raised" and re.fullmatch(reason, failure.reason)  # equal in a repeated run
    file = re.search(r"Fragile\.reward raised .* A traceback is in (.*)\.\n", capsys.readouterr().err)
    assert file and "ZeroDivisionError: division by zero" in Path(file[1]).read_text()
    Path(file[1]).unlink()


def test_a_reward_that_raises_has_failed_if_its_traceback_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Broken(ByLetter):
        def reward(self, problem: Problem, generation: Generation) -> float:
            return float(generation.text == "a") or 1 / 0

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    (graded,) = asyncio.run(grade_groups(stream([group(PROBLEMS[0], "ab")]), PROBLEMS, Broken(), LetterJudge()))
    assert graded.rewards.tolist() == [1.0] and graded.group.failures[1].kind == "raised"
    printed = capsys.readouterr().err
    assert "Broken.reward raised ZeroDivisionError" in printed and "traceback" not in printed


def test_a_judge_that_raises_has_failed():
    class Broken(LetterJudge):
        async def cluster(self, group: Group) -> Clustering:
            return json.loads("no JSON")

    (graded,) = asyncio.run(grade_groups(stream([group(PROBLEMS[0], "ab")]), PROBLEMS, ByLetter(), Broken()))
    assert isinstance(graded.clustering, JudgeFailure) and graded.clustering.kind == "raised"
    assert re.search(
        r"Broken\.cluster raised JSONDecodeError .*'p' at .*test_grading\.py:\d+", graded.clustering.reason
    )
    assert len(graded.rewards) == 2


def test_rewards_and_judges_that_hang_are_late(monkeypatch: pytest.MonkeyPatch):
    time, ended = SimulatedTime(monkeypatch, grading), threading.Event()

    class Hanging(ByLetter):
        def reward(self, problem: Problem, generation: Generation) -> float:
            if generation.text == "b":
                time.expire()
                ended.wait()
            return 1.0

    class Waiting(LetterJudge):
        async def cluster(self, group: Group) -> Clustering:
            time.expire()
            await asyncio.Event().wait()
            raise AssertionError

    async def grade(task: ByLetter, judge: LetterJudge) -> GradedGroup:
        one = stream([group(PROBLEMS[0], "ab")])
        (graded,) = await grade_groups(one, PROBLEMS, task, judge, timeout_seconds=5.0)
        return graded

    clustering = asyncio.run(grade(ByLetter(), Waiting())).clustering
    assert isinstance(clustering, JudgeFailure) and clustering.kind == "late"
    late = "Hanging.reward of problem 'p' did not return within rollouts.grading_timeout_seconds=5"
    try:
        for _ in range(MAX_ABANDONED - 1):
            one = asyncio.run(grade(Hanging(), LetterJudge()))
            assert one.rewards.tolist() == [1.0] and one.group.failures[1].kind == "late"
            assert late in one.group.failures[1].reason
        with pytest.raises(EpisodeError, match=rf"^{MAX_ABANDONED} calls of rewards have not returned"):
            asyncio.run(grade(Hanging(), LetterJudge()))
    finally:
        ended.set()


def test_a_judge_that_blocks_its_event_loop_is_late_and_later_calls_have_another_loop(monkeypatch: pytest.MonkeyPatch):
    time, ended = SimulatedTime(monkeypatch, grading), threading.Event()

    class Blocking(LetterJudge):
        async def cluster(self, group: Group) -> Clustering | JudgeFailure:
            if group.problem.id == "p":
                time.expire()
                ended.wait(PATIENCE)
            return await super().cluster(group)

    found = []
    try:
        for problem in PROBLEMS[:2]:
            groups = stream([group(problem, "ab")])
            (graded,) = asyncio.run(grade_groups(groups, [problem], ByLetter(), Blocking(), timeout_seconds=5.0))
            assert not ended.is_set()
            found.append(graded.clustering)
    finally:
        ended.set()
    assert isinstance(found[0], JudgeFailure) and found[0].kind == "late" and isinstance(found[1], Clustering)


class OwnStrategies(ByLetter):
    def strategy(self, problem: Problem, generation: Generation) -> str:
        return {"a": "first"}[generation.text]

    def answer(self, problem: Problem, generation: Generation) -> str:
        return self.strategy(problem, generation)


@pytest.mark.parametrize(
    "make_judge", [ExactJudge, AnswerJudge, lambda task: JoinedJudge(LetterJudge(), ExactJudge(task))]
)
def test_a_strategy_that_raises_is_a_failure_of_the_judge(make_judge: Callable[[OwnStrategies], Judge]):
    task = OwnStrategies()
    judge, groups = make_judge(task), [group(PROBLEMS[0], "aa"), group(PROBLEMS[1], "ab")]
    first, second = asyncio.run(grade_groups(stream(groups), PROBLEMS[:2], task, judge))
    assert isinstance(first.clustering, Clustering) and isinstance(second.clustering, JudgeFailure)
    line = OwnStrategies.strategy.__code__.co_firstlineno + 1
    text = f"{type(judge).__name__}.cluster raised KeyError for problem 'q' at {__file__}:{line}: 'b'."
    assert (second.clustering.kind, second.clustering.reason) == ("raised", text)


@pytest.mark.parametrize("error", [StopIteration, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_errors_that_asyncio_cannot_raise_are_failures(error: type[BaseException]):
    """The step would otherwise wait forever, or SystemExit(0) would end the run without an error."""

    class Broken(ByLetter):
        def reward(self, problem: Problem, generation: Generation) -> float:
            raise error("in the reward")

        def answer(self, problem: Problem, generation: Generation) -> str | None:
            raise error("in the answer")

        def same_answer(self, problem: Problem, first: str, second: str) -> bool:
            return first == second

    grading = grade_groups(stream([group(PROBLEMS[0], "ab")]), PROBLEMS, Broken(), LetterJudge())
    (graded,) = asyncio.run(asyncio.wait_for(grading, timeout=PATIENCE))
    assert all(f"{error.__name__}" in failure.reason for failure in graded.group.failures.values())
    assert not len(graded.rewards)
    judging = AnswerJudge(Broken()).cluster(group(PROBLEMS[0], "ab"))
    with pytest.raises(RuntimeError, match=f"{error.__name__}: in the answer"):
        asyncio.run(asyncio.wait_for(judging, timeout=PATIENCE))


def test_the_overlap_of_judging_and_generation_is_measured(now: list[float]):
    """The judge takes 4 s. During the first second, the next prompt is still being generated."""

    clock = StageClock()

    async def main() -> None:
        is_judging, is_generated, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

        async def generate() -> AsyncIterator[Group]:
            yield group(PROBLEMS[0], "ab")
            await is_judging.wait()
            now[0] += 1
            yield group(PROBLEMS[1], "ab")
            is_generated.set()

        class Slow(LetterJudge):
            async def cluster(self, group: Group):
                loop.call_soon_threadsafe(is_judging.set)
                if group.problem.id == "p":
                    await asyncio.to_thread(is_generated.wait)
                    now[0] += 3
                return await super().cluster(group)

        await grade_groups(generate(), PROBLEMS, ByLetter(), Slow(), clock=clock)

    asyncio.run(main())
    seconds = clock.seconds()
    assert seconds.keys() == {"seconds/generate", "seconds/grade", "seconds/judge"}
    assert (seconds["seconds/generate"], seconds["seconds/judge"]) == (1, 4)
    assert clock.overlap_fraction("judge", "generate") == 0.25
