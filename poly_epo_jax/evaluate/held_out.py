"""Measures the policy on problems it was not trained on: reward, pass@k and distinct clusters."""

from collections.abc import Sequence

import numpy as np

from poly_epo_jax.metrics import names
from poly_epo_jax.metrics.diversity import cluster_estimates, degenerate_share
from poly_epo_jax.metrics.pass_at_k import pass_at_k
from poly_epo_jax.parallel import hosts
from poly_epo_jax.rollouts.grading import cluster_ids, clustered, grade_groups, judge_failures
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.system.signals import Stop
from poly_epo_jax.types import Judge, Metrics, Problem, Sampling, Task


async def evaluate_held_out(
    rollouts: Rollouts,
    task: Task,
    judge: Judge,
    problems: Sequence[Problem],
    num_generations: int,
    sampling: Sampling,
    stop: Stop | None = None,
) -> Metrics:
    """Means over problems. `@k` is the expectation over the k-subsets of a problem's generations, k = 1, 2, 4, ...

    Raises:
      Stopped: `stop` says that the run should end.
    """
    own = hosts.share(problems)
    groups = rollouts.generate(own, num_generations, sampling)
    shares = await hosts.gather((stop or Stop()).interrupts(grade_groups(groups, own, task, judge)))
    graded = [group for share, _ in shares for group in share]
    correct, sizes = np.stack([group.correct for group in graded]), names.sizes(num_generations)
    metrics = {
        "reward": float(np.stack([group.rewards for group in graded]).mean()),
        "solved": float(correct.any(axis=1).mean()),
    }
    for k in sizes:
        metrics[names.at(names.PASS, k)] = float(pass_at_k(num_generations, correct.sum(axis=1), k).mean())

    metrics["judge_failed_problems"] = float(len(judge_failures(graded)))
    if with_clusters := clustered(graded):
        clusters = cluster_ids(with_clusters)
        estimates = cluster_estimates(clusters, np.stack([group.correct for group in with_clusters]), sizes)
        metrics |= {name: float(values.mean()) for name, values in estimates.items()}
        metrics["degenerate"] = degenerate_share(clusters)
    return {names.held_out(name): value for name, value in metrics.items()}
