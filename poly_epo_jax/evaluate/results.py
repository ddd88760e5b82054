"""Computes the results of an evaluation from its generations.jsonl."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from poly_epo_jax.evaluate.folder import read_generations
from poly_epo_jax.metrics.branching import mean_active_branches
from poly_epo_jax.metrics.evaluation import problem_values
from poly_epo_jax.metrics.intervals import bootstrap_interval

_COLUMNS = {"reward": "rewards", "correct": "correct", "answer": "answers", "cluster": "clusters"}
"""Arrays that metrics read, by their columns in generations.jsonl."""


def compute_results(folder: Path) -> dict[str, Any]:
    """Computes the metrics of all generations of a model on a benchmark.

    Args:
      folder: The folder of the model on the benchmark.

    Returns:
      The content of results.json, without the labels, sampling parameters and digests that `run_evaluation` adds.
      "metrics" has an entry {"mean", "low", "high"} for each registered evaluation metric and k, with the mean over
      problems and its 95% bootstrap interval. The bounds are None if there is only one problem. "num_problems",
      "num_generations" (per problem) and "num_clustered" (problems that have a clustering) are counts. "per_problem"
      contains the number of correct generations of each problem. Metrics that read clusters are means over the
      problems that have a clustering, and are omitted if no problem has one. "branching" contains the mean number of
      active branches by token position.

    Raises:
      ValueError: If a row is corrupted, or a metric is not finite for some problem.
    """
    problems: dict[str, dict[str, list[Any]]] = {}
    for row in read_generations(folder):
        kept = problems.setdefault(row["problem"], {name: [] for name in ("token_ids", *_COLUMNS)})
        kept["token_ids"].append(np.array(row["token_ids"], np.int32))
        for name in _COLUMNS:
            kept[name].append(row[name])
    token_ids = [kept["token_ids"] for kept in problems.values()]
    arrays = {array: np.array([kept[name] for kept in problems.values()]) for name, array in _COLUMNS.items()}
    clusters = arrays.pop("clusters")
    arrays["lengths"] = np.array([[len(ids) for ids in of_problem] for of_problem in token_ids])
    metrics = _with_intervals(problem_values(arrays))

    is_clustered = np.array([ids[0] is not None for ids in clusters])
    if is_clustered.any():
        clustered = {name: array[is_clustered] for name, array in arrays.items()}
        clustered["clusters"] = clusters[is_clustered].astype(int)
        metrics |= _with_intervals(problem_values(clustered, reading="clusters"))
    num_generations = arrays["correct"].shape[1]
    return {
        "num_problems": len(problems),
        "num_generations": num_generations,
        "num_clustered": int(is_clustered.sum()),
        "metrics": metrics,
        "branching": {"mean": mean_active_branches(token_ids).tolist()},
        "per_problem": [
            {"problem": problem, "num_correct": int(count), "num_generations": num_generations}
            for problem, count in zip(problems, arrays["correct"].sum(axis=1), strict=True)
        ],
    }


def _with_intervals(values: Mapping[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
    """Returns the mean over problems and the interval of each metric. Bounds are None if they are not finite."""
    table = np.stack(list(values.values()), axis=1).astype(float)
    # The variation between problems cannot be estimated from a single problem.
    low, high = bootstrap_interval(table) if len(table) > 1 else (np.full(table.shape[1], np.nan),) * 2
    means = table.mean(axis=0)
    return {
        name: {"mean": float(mean), "low": _finite(bottom), "high": _finite(top)}
        for name, mean, bottom, top in zip(values, means, low, high, strict=True)
    }


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
