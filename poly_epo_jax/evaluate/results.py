"""Computes the results of an evaluation from its generations.jsonl."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from poly_epo_jax.evaluate.folder import read_generations
from poly_epo_jax.metrics.branching import mean_active_branches
from poly_epo_jax.metrics.evaluation import describe, problem_values
from poly_epo_jax.metrics.intervals import bootstrap_interval, fraction_interval

_COLUMNS = {"reward": "rewards", "correct": "correct", "answer": "answers", "cluster": "clusters"}
"""Arrays that metrics read, by their columns in generations.jsonl."""

INTERVALS = (
    "95% intervals over problems: Learned-Miller and Thomas (2019) for fractions such as pass@k and majority@k, which "
    "equals Clopper-Pearson if all values are 0 or 1; bootstrap for other metrics, unless all values are equal"
)
"""Methods of the intervals in results.json."""


def compute_results(folder: Path) -> dict[str, Any]:
    """Computes the metrics of all generations of a model on a benchmark.

    Args:
      folder: The folder of the model on the benchmark.

    Returns:
      The content of results.json, without the labels, sampling parameters and digests that `run_evaluation` adds.
      "metrics" has an entry {"mean", "low", "high"} for each registered evaluation metric and k, with the mean over
      problems and its 95% interval. The bounds are None if there is only one problem. "intervals" is `INTERVALS`, which
      names the methods that tables and figures show. "num_problems",
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
        "intervals": INTERVALS,
        "metrics": metrics,
        "branching": {"mean": mean_active_branches(token_ids).tolist()},
        "per_problem": [
            {"problem": problem, "num_correct": int(count), "num_generations": num_generations}
            for problem, count in zip(problems, arrays["correct"].sum(axis=1), strict=True)
        ],
    }


def _with_intervals(values: Mapping[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
    """Returns the mean over problems and the interval of each metric. Bounds are None if there is one problem."""
    entries: dict[str, dict[str, float | None]] = {
        name: {"mean": float(column.mean()), "low": None, "high": None} for name, column in values.items()
    }
    for is_fraction, interval in ((True, fraction_interval), (False, bootstrap_interval)):
        columns = {name: column for name, column in values.items() if describe(name).is_fraction == is_fraction}
        # The variation between problems cannot be estimated from a single problem.
        if columns and len(next(iter(columns.values()))) > 1:
            bounds = interval(np.stack(list(columns.values()), axis=1))
            for name, low, high in zip(columns, *bounds, strict=True):
                entries[name] |= {"low": float(low), "high": float(high)}
    return entries
