"""Grades and judges groups as soon as they are generated, while other groups are still being generated."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from poly_epo_jax.judges.exact import clusters_of
from poly_epo_jax.records.timeline import StageClock
from poly_epo_jax.rollouts.returned_values import checked_clustering, checked_rewards, minimum_correct
from poly_epo_jax.rollouts.rewards import CallFailure, response_reward
from poly_epo_jax.system.daemon_thread import in_background_loop, in_daemon_thread, num_abandoned_threads
from poly_epo_jax.system.pending_calls import pending_call
from poly_epo_jax.system.repeated_warnings import warn_repeatedly
from poly_epo_jax.system.user_code import UserCodeError, is_own, user_code
from poly_epo_jax.types import (
    Clustering,
    EnvironmentFailure,
    Generation,
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
    """Raised when failures leave out more than `rollouts.max_failed_fraction` of a batch's prompts, or all prompts."""


async def grade_groups(
    groups: AsyncIterator[Group],
    problems: Sequence[Problem],
    task: Task,
    judge: Judge,
    then: Callable[[GradedGroup], Awaitable[None]] | None = None,
    clock: StageClock | None = None,
    timeout_seconds: float = 600.0,
    min_group: int = 1,
) -> list[GradedGroup]:
    """Grades and judges each group as soon as it is complete.

    A response is masked if the environment failed on it, or if a user's reward raises an exception or exceeds the time
    limit: it has no reward, and the judge, updates and metrics only use the other responses of its group. If a user's
    judge does so, it has failed on the group.

    Args:
      groups: Groups in the order in which their generations complete.
      problems: Problems of these groups. The result has the same order.
      task: Computes the rewards, unless the generations have outcomes.
      judge: Clusters the generations of each group.
      then: Function that is called with each graded group that is not left out. If None, nothing is called.
      clock: Records when groups were generated, graded or judged. If None, a new clock is used.
      timeout_seconds: Maximum time in seconds of a user's reward on a response, and of a user's judge on a group.
        Rewards and judges of this package have separate limits.
      min_group: Minimum number of remaining responses of a group. Groups with fewer are left out.

    Returns:
      The graded groups. Groups that are left out have no rewards and no clustering.

    Raises:
      ValueError: If the task or the judge returns an invalid value.
      Exception: If `then` raises. Like all other errors, it ends the generation of the remaining groups.
      EpisodeError: If `MAX_ABANDONED` calls of a reward have not returned, because threads cannot be stopped.
    """
    clock = clock or StageClock()
    running = []
    try:
        with clock.stage("generate"):
            async for group in groups:
                running.append(asyncio.create_task(_grade(group, task, judge, clock, then, timeout_seconds, min_group)))
                if any(grading.done() and grading.exception() for grading in running):
                    break
            if isinstance(groups, AsyncGenerator):
                await groups.aclose()  # after an error, the remaining groups are not needed
        graded = await asyncio.gather(*running)
    finally:
        for grading in running:
            grading.cancel()
    places = {(problem.id, problem.occurrence): place for place, problem in enumerate(problems)}
    graded.sort(key=lambda one: places[one.group.problem.id, one.group.problem.occurrence])
    return graded


async def _grade(
    group: Group, task: Task, judge: Judge, clock: StageClock, then: Any, timeout_seconds: float, min_group: int
) -> GradedGroup:
    with clock.stage("grade"):
        group, rewards, parts = await _rewarded(group, task, timeout_seconds)
    if len(rewards) < min_group:
        return GradedGroup(group, np.zeros(0, np.float32), np.zeros(0, bool), None)
    with clock.stage("judge"):
        # A user's judge may block its event loop.
        work = in_background_loop(judge.cluster(group)) if is_own(judge) else judge.cluster(group)
        found = await limited_call(work, judge, "cluster", group.problem, timeout_seconds)
    clustering = checked_clustering(judge, group, JudgeFailure(*found) if isinstance(found, CallFailure) else found)
    correct = rewards >= minimum_correct(task)
    for index, generation in enumerate(group.generations):
        if generation.outcome is not None and generation.outcome.correct is not None:
            correct[index] = generation.outcome.correct
    graded = GradedGroup(group, rewards, correct, clustering, parts)
    if then is not None:
        await then(graded)
    return graded


async def _rewarded(
    group: Group, task: Task, timeout_seconds: float
) -> tuple[Group, Float[np.ndarray, " M"], dict[str, Float[np.ndarray, " M"]]]:
    """Returns the group without the generations whose reward failed, and the rewards of the others with their parts."""

    async def limited(work: Awaitable[Any], method: str) -> Any:
        found = await limited_call(work, task, method, group.problem, timeout_seconds)
        if isinstance(found, CallFailure) and (count := num_abandoned_threads()) >= MAX_ABANDONED:
            raise EpisodeError(f"{count} calls of rewards have not returned, and cannot be stopped. {found.reason}")
        return found

    # Only a user's reward can fail, so only its calls are separate.
    is_separate = isinstance(task, HasRewards) or (is_own(task) and isinstance(task, Rewarded))
    parts = [[one] for one in group.generations] if is_separate else [group.generations] * bool(group.generations)
    if isinstance(task, HasRewards):
        found = await asyncio.gather(*(response_reward(task, group.problem, one, limited) for (one,) in parts))
    else:
        found = [await limited(_scores(task, group.problem, part), "reward") for part in parts]
    failures, remaining, scores = dict(group.failures), list[Generation](), list[tuple[Any, dict[str, float]]]()
    for index, part, of_part in zip(group.indices, parts, found, strict=False):
        if isinstance(of_part, CallFailure):
            failures[index] = EnvironmentFailure(*of_part)
        else:
            remaining += part
            scores += of_part
    if len(remaining) < len(group.generations):
        group = dataclasses.replace(group, generations=tuple(remaining), failures=failures)
    columns = {
        name: np.array([own[name] for _, own in scores], np.float32) for name in (scores[0][1] if scores else ())
    }
    return group, checked_rewards(task, group.problem, [reward for reward, _ in scores]), columns


async def limited_call(
    work: Awaitable[Any], component: Any, method: str, problem: Problem, timeout_seconds: float
) -> Any:
    """Returns the result of a call of a component.

    If a user has defined the component and the call raises an exception or exceeds the time limit, returns the failure.
    """
    limit = asyncio.timeout(timeout_seconds if is_own(component) else None)
    name = f"{type(component).__name__}.{method}"
    try:
        async with limit:
            with pending_call(f"{name} of problem {problem.id!r}"), user_code(component, method, problem.id):
                return await work
    except UserCodeError as error:
        failure, warning = CallFailure("raised", error.reason), str(error)
    except TimeoutError:
        if not limit.expired():
            raise
        late = f"did not return within rollouts.grading_timeout_seconds={timeout_seconds:g}"
        failure = CallFailure("late", warning := f"{name} of problem {problem.id!r} {late}.")
    warn_repeatedly(name, warning)
    return failure


async def _scores(
    task: Task, problem: Problem, generations: Sequence[Generation]
) -> list[tuple[Any, dict[str, float]]]:
    """Returns the reward of each generation, and its parts by name."""
    if outcomes := [generation.outcome for generation in generations if generation.outcome is not None]:
        return [(outcome.reward, {}) for outcome in outcomes]
    assert isinstance(task, Rewarded)
    return await in_daemon_thread(lambda: [(task.reward(problem, generation), {}) for generation in generations])


def complete_groups(graded: Sequence[GradedGroup]) -> list[GradedGroup]:
    """Returns the groups that are not left out."""
    return [group for group in graded if len(group.rewards)]


def left_out_groups(graded: Sequence[GradedGroup]) -> list[GradedGroup]:
    """Returns the groups that are left out."""
    return [group for group in graded if not len(group.rewards)]


def environment_failures(graded: Sequence[GradedGroup]) -> list[EnvironmentFailure]:
    """Returns the failures of all responses that are masked."""
    return [failure for group in graded for failure in group.group.failures.values()]


def usable_groups(graded: Sequence[GradedGroup], reads_judge: bool, on_failure: str) -> list[GradedGroup]:
    """Returns the groups that take part in the update.

    Args:
      graded: Graded groups of a batch that are not left out.
      reads_judge: Whether the method reads the judge's output.
      on_failure: Value of `judge.on_failure`. "drop" leaves out the groups on which the judge failed if `reads_judge`,
        "drop_always" leaves them out with every method. With "distinct", each of their responses is its own cluster
        if `reads_judge`.
    """
    if on_failure == "distinct" and reads_judge:
        return [
            dataclasses.replace(group, clustering=clusters_of(range(len(group.group.generations))))
            if isinstance(group.clustering, JudgeFailure)
            else group
            for group in graded
        ]
    if on_failure == "drop_always" or reads_judge:
        return [group for group in graded if not isinstance(group.clustering, JudgeFailure)]
    return list(graded)


def clustered(graded: Sequence[GradedGroup]) -> list[GradedGroup]:
    """Returns the groups that have a clustering."""
    return [group for group in graded if isinstance(group.clustering, Clustering)]


def cluster_ids(graded: Sequence[GradedGroup]) -> list[Int[np.ndarray, " M"]]:
    """Returns the cluster ids of each group that has a clustering, int32."""
    return [np.asarray(one.clustering.ids, np.int32) for one in graded if isinstance(one.clustering, Clustering)]


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
    """Verifies that failures of the environment or reward did not leave out too many groups.

    Args:
      graded: Graded groups of a batch.
      max_failed_fraction: Maximum fraction of groups that may be left out.

    Raises:
      EpisodeError: If more than this fraction of the groups, or all groups, are left out.
    """
    left_out = left_out_groups(graded)
    if left_out and (len(left_out) > max_failed_fraction * len(graded) or len(left_out) == len(graded)):
        limit = f"more than rollouts.max_failed_fraction={max_failed_fraction:g} allows"
        raise EpisodeError(
            f"The environment or reward failed on {len(left_out)} of {len(graded)} prompts, "
            f"{limit if len(left_out) < len(graded) else 'which leaves no prompt'}. "
            f"{_most_frequent(environment_failures(left_out))}"
        )


def _most_frequent(failures: Sequence[JudgeFailure | EnvironmentFailure]) -> str:
    kind, count = Counter(failure.kind for failure in failures).most_common(1)[0]
    return (
        f"The most frequent failure is {kind} ({count} times), for example: "
        f"{next(failure.reason for failure in failures if failure.kind == kind)}"
    )
