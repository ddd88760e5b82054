"""Computes every number of an evaluation from its generations on disk."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from poly_epo_jax.evaluate.folder import read_generations
from poly_epo_jax.metrics import names
from poly_epo_jax.metrics.branching import mean_active_branches
from poly_epo_jax.metrics.diversity import cluster_estimates
from poly_epo_jax.metrics.intervals import bootstrap_interval
from poly_epo_jax.metrics.majority import answer_entropy, majority_at_k
from poly_epo_jax.metrics.pass_at_k import pass_at_k
from poly_epo_jax.system.json_files import Row


def compute_results(folder: Path) -> dict[str, Any]:
    """The metrics of generations.jsonl, each {"mean", "low", "high"}: means over problems, and 95% bootstrap bounds.

    With m generations of each problem: pass@k for every k up to m; majority_accuracy@k and majority_share@k for k = 1,
    2, 4, ... up to m, and also correct_clusters@k and incorrect_clusters@k if problems were clustered; solved,
    answer_entropy, response_length; and "branching", the mean number of active branches by token position.

    Raises:
      ValueError: a row is damaged.
    """
    problems: dict[str, list[Row]] = {}
    token_ids: dict[str, list[np.ndarray]] = {}
    for row in read_generations(folder):
        token_ids.setdefault(row["problem"], []).append(np.array(row["token_ids"], np.int32))
        kept = {name: row[name] for name in ("correct", "answer", "cluster")}
        problems.setdefault(row["problem"], []).append(kept)
    correct = np.array([[row["correct"] for row in rows] for rows in problems.values()])
    answers = np.array([[row["answer"] for row in rows] for rows in problems.values()])
    lengths = np.array([[len(ids) for ids in rows] for rows in token_ids.values()])
    num_correct, num_generations = correct.sum(axis=1), correct.shape[1]
    sizes = names.sizes(num_generations)

    values = {
        names.at(names.PASS, k): pass_at_k(num_generations, num_correct, k) for k in range(1, num_generations + 1)
    }
    for k in sizes:
        accuracy, share = majority_at_k(answers, correct, k)
        values |= {names.at(names.MAJORITY_ACCURACY, k): accuracy, names.at(names.MAJORITY_SHARE, k): share}
    values |= {"solved": correct.any(axis=1).astype(float), "answer_entropy": answer_entropy(answers)}
    values |= {"response_length": lengths.mean(axis=1)}
    metrics = _with_intervals(values)

    clustered = [place for place, rows in enumerate(problems.values()) if rows[0]["cluster"] is not None]
    if clustered:
        tables = list(problems.values())
        clusters = np.array([[row["cluster"] for row in tables[place]] for place in clustered])
        metrics |= _with_intervals(cluster_estimates(clusters, correct[clustered], sizes))
    return {
        "num_problems": len(problems),
        "num_generations": num_generations,
        "num_clustered": len(clustered),
        "metrics": metrics,
        "branching": {"mean": mean_active_branches(list(token_ids.values())).tolist()},
        "per_problem": [
            {"problem": problem, "num_correct": int(count), "num_generations": num_generations}
            for problem, count in zip(problems, num_correct, strict=True)
        ],
    }


def _with_intervals(values: Mapping[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
    """The mean over problems of each metric, and its bounds."""
    table = np.stack(list(values.values()), axis=1).astype(float)
    # A single problem says nothing about how problems differ.
    low, high = bootstrap_interval(table) if len(table) > 1 else (np.full(table.shape[1], np.nan),) * 2
    means = table.mean(axis=0)
    return {
        name: {"mean": float(mean), "low": _finite(bottom), "high": _finite(top)}
        for name, mean, bottom, top in zip(values, means, low, high, strict=True)
    }


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
