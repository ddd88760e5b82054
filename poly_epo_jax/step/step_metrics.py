"""What a training step records: its metrics, and a row for each of its generations."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from poly_epo_jax import set_rl
from poly_epo_jax.metrics.diversity import correct_clusters, degenerate_share, incorrect_clusters
from poly_epo_jax.records.run_folder import generation_rows
from poly_epo_jax.rollouts.grading import cluster_ids, clustered, judge_failures
from poly_epo_jax.system.json_files import Row
from poly_epo_jax.types import GradedGroup, Metrics


def step_metrics(groups: Sequence[GradedGroup], step: int, set_size: int) -> Metrics:
    """Metrics of a step's generations."""
    generations = [generation for graded in groups for generation in graded.group.generations]
    failures = Counter(failure.kind for failure in judge_failures(groups))
    rollouts = {
        "reward": float(np.stack([graded.rewards for graded in groups]).mean()),
        "solved": float(np.mean([graded.correct.any() for graded in groups])),
        "response/length": float(np.mean([generation.loss_mask.sum() for generation in generations])),
        "response/truncated": float(np.mean([generation.finish_reason == "length" for generation in generations])),
        # How many steps the sampling weights were behind the policy that is trained now.
        "response/staleness": float(np.mean([step - 1 - generation.weight_version for generation in generations])),
        "judge/failed_prompts": float(failures.total()),
    }
    failed = {f"judge/failed/{kind}": float(count) for kind, count in failures.items()}
    return rollouts | failed | cluster_metrics(clustered(groups), set_size)


def cluster_metrics(groups: Sequence[GradedGroup], set_size: int) -> Metrics:
    """Means over prompts, each of which has a clustering; `synergy` is the mean size of the covariance term."""
    if not groups:
        return {}
    rewards, correct = np.stack([graded.rewards for graded in groups]), np.stack([graded.correct for graded in groups])
    clusters, num_generations = cluster_ids(groups), rewards.shape[1]
    terms = set_rl.exploration_exploitation_synergy(rewards, clusters, set_size)
    return {
        "clusters/correct": float(correct_clusters(clusters, correct, num_generations).mean()),
        "clusters/incorrect": float(incorrect_clusters(clusters, correct, num_generations).mean()),
        "degenerate": degenerate_share(clusters),
        "synergy": float(np.abs(terms.synergy).mean()),
    }


def logged_generations(
    groups: Sequence[GradedGroup], usable: Sequence[GradedGroup], advantages: Float[np.ndarray, "P N"]
) -> list[Row]:
    """A row of generations.jsonl for each generation, without the step.

    Args:
      usable: the groups that take part in the update.
      advantages: the advantages of these groups.
    """
    advantages_of = dict(zip(usable, advantages.tolist(), strict=True))
    rows = []
    for graded in groups:
        own = {"occurrence": graded.group.problem.occurrence}
        of_group = advantages_of.get(graded, [None] * len(graded.rewards))
        shared = generation_rows(graded)
        rows += [row | own | {"advantage": advantage} for row, advantage in zip(shared, of_group, strict=True)]
    return rows
