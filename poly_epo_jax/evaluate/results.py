"""Computes the results of an evaluation from its generations.jsonl."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from poly_epo_jax.evaluate.folder import read_generations
from poly_epo_jax.metrics.branching import mean_active_branches
from poly_epo_jax.metrics.evaluation import describe, problem_values
from poly_epo_jax.metrics.intervals import bootstrap_interval, fraction_interval

# Arrays that metrics read, by their columns in generations.jsonl.
_COLUMNS = {"reward": "rewards", "correct": "correct", "answer": "answers", "cluster": "clusters"}

INTERVALS = (
    "95% intervals over problems: Learned-Miller and Thomas (2019) for fractions such as pass@k and majority@k, which "
    "equals Clopper-Pearson if all values are 0 or 1; bootstrap for other metrics, unless all values are equal"
)
"""Methods of the intervals in results.json."""


def compute_results(folder: Path, timeout_seconds: float = 600.0) -> dict[str, Any]:
    """Computes the metrics of all generations of a model on a benchmark.

    Args:
      folder: The folder of the model on the benchmark.
      timeout_seconds: Maximum time in seconds of a call of a metric.

    Returns:
      The content of results.json, without the labels, sampling parameters and digests that `run_evaluation` adds.
      "metrics" has an entry {"mean", "low", "high"} for each registered evaluation metric and k, with the mean over
      problems and its 95% interval. The bounds are None if there is only one problem. "intervals" is `INTERVALS`, which
      names the methods that tables and figures show. "num_problems", "num_generations" (per problem), "num_failed"
      (generations of all problems on which the environment or the reward failed) and "num_clustered" (problems that
      have a clustering) are counts. "per_problem" contains the number of correct generations of each problem, and the
      number of generations that did not fail. All metrics are computed from them, and those at k are means over the
      problems with at least k. Metrics that read clusters are means over the problems that have a clustering, and are
      omitted if no problem has one. "branching" contains the mean number of active branches by token position.

    Raises:
      ValueError: If a row is corrupted, or a metric is not finite for some problem or does not return in time.
    """
    problems: dict[str, dict[str, list[Any]]] = {}
    num_rows = Counter[str]()
    for row in read_generations(folder):
        num_rows[row["problem"]] += 1
        if row["reward"] is None:
            continue
        kept = problems.setdefault(row["problem"], {name: [] for name in ("token_ids", *_COLUMNS)})
        kept["token_ids"].append(np.array(row["token_ids"], np.int32))
        for name in _COLUMNS:
            kept[name].append(row[name])
    token_ids = [kept["token_ids"] for kept in problems.values()]
    arrays = {array: [np.array(kept[name]) for kept in problems.values()] for name, array in _COLUMNS.items()}
    clusters = arrays.pop("clusters")
    arrays["lengths"] = [np.array([len(ids) for ids in of_problem]) for of_problem in token_ids]
    metrics = _with_intervals(problem_values(arrays, timeout_seconds=timeout_seconds))

    arrays["clusters"] = clusters
    places = [place for place, ids in enumerate(clusters) if ids[0] is not None]
    if places:
        clustered = {name: [array[place] for place in places] for name, array in arrays.items()}
        metrics |= _with_intervals(problem_values(clustered, "clusters", timeout_seconds=timeout_seconds))
    return {
        "num_problems": len(problems),
        "num_generations": max(num_rows.values()),
        "num_failed": num_rows.total() - sum(map(len, token_ids)),
        "num_clustered": len(places),
        "intervals": INTERVALS,
        "metrics": metrics,
        "branching": {"mean": mean_active_branches(token_ids).tolist()},
        "per_problem": [
            {"problem": problem, "num_correct": int(correct.sum()), "num_generations": len(correct)}
            for problem, correct in zip(problems, arrays["correct"], strict=True)
        ],
    }


def _with_intervals(values: Mapping[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
    """Returns the mean over problems and the interval of each metric. Bounds are None if there is one problem."""
    entries: dict[str, dict[str, float | None]] = {
        name: {"mean": float(column.mean()), "low": None, "high": None} for name, column in values.items()
    }
    kinds = {name: (describe(name).is_fraction, len(column)) for name, column in values.items()}
    for kind in dict.fromkeys(kinds.values()):
        is_fraction, num_problems = kind
        columns = {name: column for name, column in values.items() if kinds[name] == kind}
        # The variation between problems cannot be estimated from a single problem.
        if num_problems > 1:
            interval = fraction_interval if is_fraction else bootstrap_interval
            bounds = interval(np.stack(list(columns.values()), axis=1))
            for name, low, high in zip(columns, *bounds, strict=True):
                entries[name] |= {"low": float(low), "high": float(high)}
    return entries
