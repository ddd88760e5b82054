"""Evaluates the policy on held-out problems during training."""

from collections.abc import AsyncIterator, Sequence
from functools import partial

import numpy as np
from jaxtyping import Float

from poly_epo_jax.metrics.diversity import degenerate_share
from poly_epo_jax.metrics.evaluation import MEAN_REWARD, problem_values
from poly_epo_jax.metrics.logged import held_out
from poly_epo_jax.parallel import hosts
from poly_epo_jax.rollouts.grading import (
    check_failed_environments,
    cluster_ids,
    clustered,
    complete_groups,
    environment_failures,
    grade_groups,
    judge_failures,
)
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.returned_values import checked_counts
from poly_epo_jax.rollouts.rewards import mean_parts
from poly_epo_jax.system.daemon_thread import in_daemon_thread
from poly_epo_jax.system.evaluates import EVALUATES
from poly_epo_jax.system.signals import StopSignal
from poly_epo_jax.types import GradedGroup, Group, Interactive, Judge, Metrics, Problem, Sampling, Task


async def evaluate_held_out(
    rollouts: Rollouts,
    task: Task,
    judge: Judge,
    problems: Sequence[Problem],
    num_generations: int,
    sampling: Sampling,
    stop: StopSignal | None = None,
) -> Metrics:
    """Computes evaluation metrics as means over held-out problems.

    The result contains all registered evaluation metrics that only read `rewards`, `correct` and `clusters`, at
    k = 1, 2, 4, ... if they depend on k, the mean reward and its parts, degenerate fraction, and own failure counts.
    Metrics omit responses on which the environment or the reward failed, those at k problems with fewer other
    responses, and those of clusters problems without a clustering. Each process evaluates its share of the problems.

    Args:
      rollouts: Generates the responses.
      task: Computes the rewards.
      judge: Clusters the responses of each problem.
      problems: The held-out problems. Must be the same on all processes.
      num_generations: Number of generations per problem.
      sampling: Sampling parameters.
      stop: Interrupts the evaluation when a shutdown is requested. If None, the evaluation is not interrupted.

    Returns:
      Metrics of all problems by name, each with the prefix `eval/`.

    Raises:
      ValueError: If a registered metric has the name of another metric or is not finite, or if the task or the judge
        returns an invalid value.
      EpisodeError: If the environment or the reward failed on all generations.
      Stopped: If a shutdown was requested.
    """
    own, stop = hosts.share(problems), stop or StopSignal()
    drawing = _draw(rollouts.generate(own, num_generations, sampling), own, rollouts, task, judge)
    shares = await hosts.gather(stop.run_interruptible(drawing))
    drawn = [group for graded, _ in shares for group in graded]
    check_failed_environments(drawn, 1.0)
    graded = complete_groups(drawn)
    metrics = {
        "reward": float(np.mean([group.rewards.mean() for group in graded])),
        "judge_failed_problems": float(len(judge_failures(graded))),
    }
    if (failures := environment_failures(drawn)) or isinstance(task, Interactive):
        metrics["environment_failed_responses"] = float(len(failures))
        metrics["environment_failed_problems"] = float(len(drawn) - len(graded))
    measuring = in_daemon_thread(lambda: _values(graded, rollouts.grading_timeout_seconds))
    values, *_ = await hosts.gather(stop.run_interruptible(measuring))
    values.pop(MEAN_REWARD, None)  # "reward" is logged in all cases
    if with_clusters := clustered(graded):
        metrics["degenerate_fraction"] = degenerate_share(np.concatenate(cluster_ids(with_clusters)))
    if taken := metrics.keys() & values.keys():
        raise ValueError(
            f"{held_out(min(taken))} is the name of another metric; register the evaluation metric {min(taken)!r} "
            "under another name."
        )
    metrics |= {name: float(of_problems.mean()) for name, of_problems in values.items()} | mean_parts(graded)
    metrics |= hosts.total([counts for _, counts in shares])
    return {held_out(name): value for name, value in metrics.items()}


async def _draw(
    groups: AsyncIterator[Group], problems: Sequence[Problem], rollouts: Rollouts, task: Task, judge: Judge
) -> tuple[list[GradedGroup], Metrics]:
    """Returns the graded groups, and the counters of judge, sampling and environment. Must run in a separate task."""
    EVALUATES.set(True)
    graded = await grade_groups(groups, problems, task, judge, timeout_seconds=rollouts.grading_timeout_seconds)
    return graded, await checked_counts(
        judge, rollouts, rollouts.environments, timeout_seconds=rollouts.grading_timeout_seconds
    )


def _values(graded: Sequence[GradedGroup], timeout_seconds: float) -> dict[str, Float[np.ndarray, " _"]]:
    """Returns the values of all registered metrics, each of which has the time limit."""
    measure = partial(problem_values, curves=False, timeout_seconds=timeout_seconds)
    values = measure(_arrays(graded))
    if with_clusters := clustered(graded):
        values |= measure(_arrays(with_clusters) | {"clusters": cluster_ids(with_clusters)}, "clusters")
    return values


def _arrays(graded: Sequence[GradedGroup]) -> dict[str, list[np.ndarray]]:
    """Returns lists of the arrays `rewards` and `correct` of each group."""
    return {name: [getattr(group, name) for group in graded] for name in ("rewards", "correct")}
