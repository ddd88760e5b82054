"""Rewards and clusters for groups as they arrive: grading overlaps the generation of the other prompts."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np

from poly_epo_jax.types import GradedGroup, Group, Judge, JudgeFailure, Problem, Task


async def grade_groups(
    groups: AsyncIterator[Group], problems: Sequence[Problem], task: Task, judge: Judge
) -> list[GradedGroup]:
    """Grades and judges each group as soon as it is complete; returns them in the order of `problems`."""
    running = [asyncio.create_task(_grade(group, task, judge)) async for group in groups]
    graded = await asyncio.gather(*running)
    order = {problem.id: position for position, problem in enumerate(problems)}
    return sorted(graded, key=lambda one: order[one.group.problem.id])


async def _grade(group: Group, task: Task, judge: Judge) -> GradedGroup:
    def score() -> np.ndarray:
        return np.array([task.reward(group.problem, y.text) for y in group.generations], np.float32)

    rewards, clusters = await asyncio.gather(asyncio.to_thread(score), judge.cluster(group))
    if np.isnan(rewards).any():
        raise ValueError(
            f"The task's reward for problem {group.problem.id} is NaN; it must be a number for every text."
        )
    return GradedGroup(group, rewards, clusters)


def judged(graded: Sequence[GradedGroup]) -> list[GradedGroup]:
    """The groups that have a clustering; the others take no part in the update."""
    return [one for one in graded if not isinstance(one.clusters, JudgeFailure)]
