"""Evaluates the policy on held-out problems during training."""

from collections.abc import Sequence

import numpy as np

from poly_epo_jax.metrics.diversity import degenerate_share
from poly_epo_jax.metrics.evaluation import MEAN_REWARD, problem_values
from poly_epo_jax.metrics.logged import held_out
from poly_epo_jax.parallel import hosts
from poly_epo_jax.rollouts.grading import (
    check_failed_environments,
    cluster_ids,
    clustered,
    complete_groups,
    grade_groups,
    judge_failures,
)
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.rewards import mean_parts
from poly_epo_jax.system.signals import StopSignal
from poly_epo_jax.types import GradedGroup, Interactive, Judge, Metrics, Problem, Sampling, Task


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
    k = 1, 2, 4, ... if they depend on k. It also contains the mean reward and its parts, the number of problems on
    which the judge failed, and the fraction of degenerate responses. This fraction and the metrics that read `clusters`
    are means over the problems that have a clustering, and are omitted if no problem has one. Problems on which the
    environment failed are counted, and omitted from all other metrics. In a multi-process run, each process evaluates
    its share of the problems and returns the metrics of all problems.

    Args:
      rollouts: Generates the responses.
      task: Computes the rewards.
      judge: Clusters the responses of each problem.
      problems: The held-out problems. Must be the same on all processes.
      num_generations: Number of generations per problem.
      sampling: Sampling parameters.
      stop: Interrupts the evaluation when a shutdown is requested. If None, the evaluation is not interrupted.

    Returns:
      Metrics by name, each with the prefix `eval/`.

    Raises:
      ValueError: If a registered metric has the name of another metric or is not finite, or if the task or the judge
        returns an invalid value.
      EpisodeError: If the environment failed on all problems.
      Stopped: If a shutdown was requested.
    """
    own = hosts.share(problems)
    groups, limit = rollouts.generate(own, num_generations, sampling), rollouts.grading_timeout_seconds
    grading = grade_groups(groups, own, task, judge, timeout_seconds=limit)
    shares = await hosts.gather((stop or StopSignal()).run_interruptible(grading))
    drawn = [group for share in shares for group in share]
    check_failed_environments(drawn, 1.0)
    graded = complete_groups(drawn)
    arrays = _arrays(graded)
    metrics = {"reward": float(arrays["rewards"].mean()), "judge_failed_problems": float(len(judge_failures(graded)))}
    if isinstance(task, Interactive) or len(drawn) > len(graded):
        metrics["environment_failed_problems"] = float(len(drawn) - len(graded))
    values = problem_values(arrays, curves=False)
    values.pop(MEAN_REWARD, None)  # "reward" is logged in all cases
    if with_clusters := clustered(graded):
        clusters = cluster_ids(with_clusters)
        values |= problem_values(_arrays(with_clusters) | {"clusters": clusters}, reading="clusters", curves=False)
        metrics["degenerate_fraction"] = degenerate_share(clusters)
    if taken := metrics.keys() & values.keys():
        raise ValueError(
            f"{held_out(min(taken))} is the name of another metric; register the evaluation metric {min(taken)!r} "
            "under another name."
        )
    metrics |= {name: float(of_problems.mean()) for name, of_problems in values.items()} | mean_parts(graded)
    return {held_out(name): value for name, value in metrics.items()}


def _arrays(graded: Sequence[GradedGroup]) -> dict[str, np.ndarray]:
    """Returns `rewards` and `correct`, both of shape [P, N]."""
    return {name: np.stack([getattr(group, name) for group in graded]) for name in ("rewards", "correct")}
