"""Grades and judges groups as soon as they are generated, while other groups are still being generated."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from poly_epo_jax.judges.exact import clusters_of
from poly_epo_jax.records.timeline import StageClock
from poly_epo_jax.rollouts.returned_values import checked_clustering, checked_rewards, minimum_correct
from poly_epo_jax.rollouts.rewards import response_reward
from poly_epo_jax.system.daemon_thread import in_daemon_thread, num_abandoned_threads
from poly_epo_jax.system.repeated_warnings import warn_repeatedly
from poly_epo_jax.system.user_code import UserCodeError, is_own, user_code
from poly_epo_jax.types import (
    Clustering,
    EnvironmentFailure,
    GradedGroup,
    Group,
    HasRewards,
    Judge,
    JudgeFailure,
    Problem,
    Rewarded,
    Task,
)

MAX_ABANDONED = 8
"""Number of rewards that have not returned within their time limit after which a run stops."""


class JudgeError(RuntimeError):
    """Raised when the judge fails on more than `judge.max_failed_fraction` of a batch's prompts."""


class EpisodeError(RuntimeError):
    """Raised when the environment fails on more than `rollouts.max_failed_fraction` of a batch's prompts, or on all."""


async def grade_groups(
    groups: AsyncIterator[Group],
    problems: Sequence[Problem],
    task: Task,
    judge: Judge,
    then: Callable[[GradedGroup], Awaitable[None]] | None = None,
    clock: StageClock | None = None,
    timeout_seconds: float = 600.0,
) -> list[GradedGroup]:
    """Grades and judges each group as soon as it is complete.

    If a user's reward raises an exception or exceeds the time limit, the group counts as one whose environment failed:
    it has no rewards, and is left out of updates and metrics. If a user's judge does so, it has failed on the group.

    Args:
      groups: Groups in the order in which their generations complete.
      problems: Problems of these groups. The result has the same order.
      task: Computes the rewards, unless the generations have outcomes.
      judge: Clusters the generations of each group.
      then: Function that is called with each graded group whose environment has not failed. If None, nothing is
        called.
      clock: Records when groups were generated, graded or judged. If None, a new clock is used.
      timeout_seconds: Maximum time in seconds of a user's reward or judge on a group. Rewards and judges of this
        package have separate limits.

    Returns:
      The graded groups. Groups whose environment failed are not graded, and have no rewards.

    Raises:
      ValueError: If the task or the judge returns an invalid value.
      EpisodeError: If `MAX_ABANDONED` calls of a reward have not returned, because threads cannot be stopped.
    """
    clock = clock or StageClock()
    running = []
    try:
        with clock.stage("generate"):
            async for group in groups:
                running.append(asyncio.create_task(_grade(group, task, judge, clock, then, timeout_seconds)))
        graded = await asyncio.gather(*running)
    finally:
        for grading in running:
            grading.cancel()
    places = {(problem.id, problem.occurrence): place for place, problem in enumerate(problems)}
    graded.sort(key=lambda one: places[one.group.problem.id, one.group.problem.occurrence])
    return graded


async def _grade(
    group: Group, task: Task, judge: Judge, clock: StageClock, then: Any, timeout_seconds: float
) -> GradedGroup:
    if group.failure is not None:
        return _failed(group)

    parts: dict[str, np.ndarray] = {}

    async def score() -> np.ndarray | _CallFailure:
        with clock.stage("grade"):
            work = _rewards(task, group, parts)
            rewards = await _limited(work, task, "reward", group.problem, timeout_seconds)
        return rewards if isinstance(rewards, _CallFailure) else checked_rewards(task, group.problem, rewards)

    async def cluster() -> Any:
        with clock.stage("judge"):
            found = await _limited(judge.cluster(group), judge, "cluster", group.problem, timeout_seconds)
        return checked_clustering(judge, group, JudgeFailure(*found) if isinstance(found, _CallFailure) else found)

    rewards, clustering = await asyncio.gather(score(), cluster())
    if isinstance(rewards, _CallFailure):
        if (count := num_abandoned_threads()) >= MAX_ABANDONED:
            raise EpisodeError(f"{count} calls of rewards have not returned, and cannot be stopped. {rewards.reason}")
        return _failed(dataclasses.replace(group, generations=(), failure=EnvironmentFailure(*rewards)))
    correct = rewards >= minimum_correct(task)
    for index, generation in enumerate(group.generations):
        if generation.outcome is not None and generation.outcome.correct is not None:
            correct[index] = generation.outcome.correct
    graded = GradedGroup(group, rewards, correct, clustering, parts)
    if then is not None:
        await then(graded)
    return graded


def _failed(group: Group) -> GradedGroup:
    return GradedGroup(group, np.zeros(0, np.float32), np.zeros(0, bool), None)


class _CallFailure(NamedTuple):
    """Kind and reason of the failure of a user's reward or judge."""

    kind: str
    reason: str


async def _limited(work: Awaitable[Any], component: Any, method: str, problem: Problem, timeout_seconds: float) -> Any:
    """Returns the result of a call of a component.

    If a user has defined the component and the call raises an exception or exceeds the time limit, returns the failure.
    """
    limit = asyncio.timeout(timeout_seconds if is_own(component) else None)
    name = f"{type(component).__name__}.{method}"
    try:
        async with limit:
            with user_code(component, method, problem.id):
                return await work
    except UserCodeError as error:
        failure = _CallFailure("raised", str(error))
    except TimeoutError:
        if not limit.expired():
            raise
        late = f"did not return within rollouts.grading_timeout_seconds={timeout_seconds:g}"
        failure = _CallFailure("late", f"{name} of problem {problem.id!r} {late}.")
    warn_repeatedly(name, failure.reason)
    return failure


async def _rewards(task: Task, group: Group, parts: dict[str, np.ndarray]) -> list[Any]:
    """Returns the rewards of the generations, and adds their parts to `parts`."""
    problem, generations = group.problem, group.generations
    outcomes = [generation.outcome for generation in generations if generation.outcome is not None]
    if outcomes:
        return [outcome.reward for outcome in outcomes]
    if isinstance(task, HasRewards):
        scores = await asyncio.gather(*(response_reward(task, problem, generation) for generation in generations))
        parts.update({name: np.array([of_one[name] for _, of_one in scores], np.float32) for name in scores[0][1]})
        return [reward for reward, _ in scores]
    assert isinstance(task, Rewarded)
    return await in_daemon_thread(lambda: [task.reward(problem, generation) for generation in generations])


def complete_groups(graded: Sequence[GradedGroup]) -> list[GradedGroup]:
    """Returns the groups whose environment has not failed."""
    return [group for group in graded if group.group.failure is None]


def environment_failures(graded: Sequence[GradedGroup]) -> list[EnvironmentFailure]:
    """Returns the failures of the groups on which the environment failed."""
    return [group.group.failure for group in graded if group.group.failure is not None]


def usable_groups(graded: Sequence[GradedGroup], reads_judge: bool, on_failure: str) -> list[GradedGroup]:
    """Returns the groups that take part in the update.

    Args:
      graded: Graded groups of a batch whose environment has not failed.
      reads_judge: Whether the method reads the judge's output.
      on_failure: Value of `judge.on_failure`. "drop" leaves out the groups on which the judge failed if `reads_judge`,
        "drop_always" leaves them out with every method. With "distinct", each of their responses is its own cluster
        if `reads_judge`.
    """
    if on_failure == "distinct" and reads_judge:
        return [_with_distinct_clusters(group) for group in graded]
    if on_failure == "drop_always" or reads_judge:
        return [group for group in graded if not isinstance(group.clustering, JudgeFailure)]
    return list(graded)


def _with_distinct_clusters(graded: GradedGroup) -> GradedGroup:
    if not isinstance(graded.clustering, JudgeFailure):
        return graded
    return dataclasses.replace(graded, clustering=clusters_of(range(len(graded.group.generations))))


def clustered(graded: Sequence[GradedGroup]) -> list[GradedGroup]:
    """Returns the groups that have a clustering."""
    return [group for group in graded if isinstance(group.clustering, Clustering)]


def cluster_ids(graded: Sequence[GradedGroup]) -> Int[np.ndarray, "P N"]:
    """Returns the cluster ids [P, N], int32, of the P groups that have a clustering."""
    ids = [group.clustering.ids for group in graded if isinstance(group.clustering, Clustering)]
    return np.array(ids, np.int32).reshape(len(ids), -1 if ids else 0)


def judge_failures(graded: Sequence[GradedGroup]) -> list[JudgeFailure]:
    """Returns the failures of the groups on which the judge failed."""
    return [group.clustering for group in graded if isinstance(group.clustering, JudgeFailure)]


def check_failed_fraction(graded: Sequence[GradedGroup], max_failed_fraction: float) -> None:
    """Verifies that the judge did not fail too often.

    Args:
      graded: Graded groups of a batch.
      max_failed_fraction: Maximum fraction of groups on which the judge may fail.

    Raises:
      JudgeError: If the judge failed on more than this fraction of the groups.
    """
    failures = judge_failures(graded)
    if len(failures) > max_failed_fraction * len(graded):
        raise JudgeError(
            f"The judge failed on {len(failures)} of {len(graded)} prompts, more than "
            f"judge.max_failed_fraction={max_failed_fraction:g} allows. {_most_frequent(failures)}"
        )


def check_failed_environments(graded: Sequence[GradedGroup], max_failed_fraction: float) -> None:
    """Verifies that the environment did not fail too often.

    Args:
      graded: Graded groups of a batch.
      max_failed_fraction: Maximum fraction of groups on which the environment may fail.

    Raises:
      EpisodeError: If the environment failed on more than this fraction of the groups, or on all groups.
    """
    failures = environment_failures(graded)
    if failures and (len(failures) > max_failed_fraction * len(graded) or len(failures) == len(graded)):
        raise EpisodeError(
            f"The environment or reward failed on {len(failures)} of {len(graded)} prompts, but at most "
            f"rollouts.max_failed_fraction={max_failed_fraction:g} of them, and not all, may fail. "
            f"{_most_frequent(failures)}"
        )


def _most_frequent(failures: Sequence[JudgeFailure | EnvironmentFailure]) -> str:
    kind, count = Counter(failure.kind for failure in failures).most_common(1)[0]
    reason = next(failure.reason for failure in failures if failure.kind == kind)
    return f"The most frequent failure is {kind} ({count} times), for example: {reason}"
