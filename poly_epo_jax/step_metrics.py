"""What a training step leaves behind: its metrics, and a row for each of its generations."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from poly_epo_jax import set_rl
from poly_epo_jax.grading import judge_failures
from poly_epo_jax.metrics.diversity import distinct_clusters
from poly_epo_jax.types import Clustering, GradedGroup, Metrics


def rollout_metrics(graded: Sequence[GradedGroup], step: int) -> Metrics:
    rewards = np.stack([one.rewards for one in graded])
    generations = [y for one in graded for y in one.group.generations]
    failures = Counter(failure.kind for failure in judge_failures(graded))
    return {
        "reward": float(rewards.mean()),
        "solved": float((rewards == 1).any(axis=1).mean()),
        "response/length": float(np.mean([len(y.token_ids) for y in generations])),
        "response/truncated": float(np.mean([y.finish_reason == "length" for y in generations])),
        # Steps that the sampling weights were behind the policy which is trained now.
        "response/staleness": float(np.mean([step - 1 - y.weight_version for y in generations])),
        "judge/failed_prompts": float(failures.total()),
    } | {f"judge/failed/{kind}": float(count) for kind, count in failures.items()}


def cluster_metrics(rewards: Float[np.ndarray, "P N"], clusters: Int[np.ndarray, "P N"], set_size: int) -> Metrics:
    """Means over the prompts that have a clustering; `synergy` is the mean size of the covariance term."""
    if not len(rewards):
        return {}
    reasoned, correct = clusters != set_rl.DEGENERATE_CLUSTER, rewards == 1
    terms = set_rl.exploration_exploitation_synergy(rewards, clusters, set_size)
    size = rewards.shape[1]
    return {
        "clusters/correct": float(distinct_clusters(clusters, correct & reasoned, size).mean()),
        "clusters/incorrect": float(distinct_clusters(clusters, ~correct & reasoned, size).mean()),
        "degenerate": float(1 - reasoned.mean()),
        "synergy": float(np.abs(terms.synergy).mean()),
    }


def sample_rows(graded: Sequence[GradedGroup], advantages: np.ndarray) -> list[dict[str, Any]]:
    advantage_rows = iter(advantages.tolist())
    rows = []
    for one in graded:
        nothing = [None] * len(one.rewards)
        clusters = rationales = of_prompt = nothing
        if isinstance(one.clustering, Clustering):
            clusters, of_prompt = one.clustering.ids.tolist(), next(advantage_rows)
            rationales = one.clustering.rationales or nothing
        rows += [
            {
                "problem": one.group.problem.id,
                "prompt": one.group.problem.prompt,
                "generation": index,
                "response": y.text,
                "reward": float(one.rewards[index]),
                "cluster": clusters[index],
                "rationale": rationales[index],
                "advantage": of_prompt[index],
            }
            for index, y in enumerate(one.group.generations)
        ]
    return rows
