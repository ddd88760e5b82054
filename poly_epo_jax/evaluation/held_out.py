"""What the policy does on problems it was not trained on: reward, pass@k and distinct clusters."""

from collections.abc import Sequence

import numpy as np

from poly_epo_jax.grading import cluster_ids, grade_groups, judged
from poly_epo_jax.metrics.diversity import distinct_clusters
from poly_epo_jax.metrics.pass_at_k import pass_at_k
from poly_epo_jax.parallel import hosts
from poly_epo_jax.types import DEGENERATE_CLUSTER, Judge, Metrics, Problem, Rollouts, Sampling, Task


async def evaluate_held_out(
    rollouts: Rollouts, task: Task, judge: Judge, problems: Sequence[Problem], num_generations: int, sampling: Sampling
) -> Metrics:
    """Means over problems. `@k` is the expectation over the k-subsets of a problem's generations, for k = 1, 2, 4, ...;
    a generation is correct where its reward is 1."""
    own = hosts.share(problems)
    groups = rollouts.generate(own, num_generations, sampling)
    graded = [one for share, _ in await hosts.gather(grade_groups(groups, own, task, judge)) for one in share]
    rewards = np.stack([one.rewards for one in graded])
    correct = rewards == 1
    sizes = [2**i for i in range(num_generations.bit_length()) if 2**i <= num_generations]
    metrics = {"eval/reward": float(rewards.mean()), "eval/solved": float(correct.any(axis=1).mean())}
    for k in sizes:
        metrics[f"eval/pass@{k}"] = float(pass_at_k(num_generations, correct.sum(axis=1), k).mean())

    clustered = judged(graded)
    metrics["eval/judge_failed_problems"] = float(len(graded) - len(clustered))
    if clustered:
        clusters = cluster_ids(clustered)
        correct = np.stack([one.rewards == 1 for one in clustered])
        reasoned = clusters != DEGENERATE_CLUSTER
        metrics["eval/degenerate"] = float(1 - reasoned.mean())
        for k in sizes:
            for name, selected in (("correct", correct & reasoned), ("incorrect", ~correct & reasoned)):
                metrics[f"eval/{name}_clusters@{k}"] = float(distinct_clusters(clusters, selected, k).mean())
    return metrics
