"""Summarizes audits of a judge: stability, effect of copies, and agreement with a second judge, the auditor."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from poly_epo_jax.metrics.agreement import (
    RAND_BOUNDS,
    adjusted_rand_index,
    degenerate_as_singletons,
    pairwise_agreement,
)
from poly_epo_jax.metrics.diversity import num_clusters, polychromic_value
from poly_epo_jax.metrics.intervals import mean_over_problems

FRACTIONS = ("pairwise_agreement", "repetition", "order", "paraphrase", "announcement", "padding")
"""Results that are means of values from 0 to 1."""
AUDIT_METRICS = {
    "inflation": (
        "inflation",
        "Clusters of the training judge divided by clusters of the auditor, both summed over prompts. 1: as many.",
    ),
    "adjusted_rand_index": ("adjusted Rand index", "Agreement of judge and auditor, adjusted for chance. 1: equal."),
    "pairwise_agreement": ("pairwise agreement", "Fraction of pairs of responses on which judge and auditor agree."),
    "clusters": ("clusters of the judge", "Clusters per prompt, without the degenerate one: the rewarded diversity."),
    "auditor_clusters": ("clusters of the auditor", "Clusters per prompt, without the degenerate one."),
    "objective": ("objective", "Mean over sets of mean reward times diversity, by the judge."),
    "auditor_objective": ("objective by the auditor", "The objective with the clusters of the auditor."),
    "repetition": ("repetition", "Fraction of pairs of responses whose verdict changes in a repeated request."),
    "order": ("order", "Fraction of pairs whose verdict changes if the judge reads the responses in another order."),
    "paraphrase": ("paraphrase", "Fraction of copies in other words that are assigned to another cluster."),
    "announcement": ("announcement", "Fraction of copies that announce another method, assigned to another cluster."),
    "padding": ("padding", "Fraction of copies that continue after their answer, assigned to another cluster."),
}
"""Titles and meanings of the results of an audit."""


def summarize(rows: Iterable[Mapping[str, Any]], set_size: int) -> dict[str, Any]:
    """Computes the results of `AUDIT_METRICS` over the prompts of audit.jsonl.

    Args:
      rows: Rows with the columns of `records.run_folder.AUDITED`.
      set_size: Number n of generations per set of the objective.

    Returns:
      By metric, "mean", "low" and "high" (ends of the 95% interval over prompts) and "num_problems", or None if no
      prompt has a value.
    """
    values: dict[str, list[Any]] = {name: [] for name in AUDIT_METRICS}
    pairs = []
    for row in rows:
        found, rewards = dict(row["probes"]), np.array(row["rewards"])
        ids = [np.array(row[name]) for name in ("clusters", "auditor") if row[name] is not None]
        for prefix, of_judge in zip(("", "auditor_"), ids, strict=False):
            found[f"{prefix}clusters"] = num_clusters(of_judge)
            found[f"{prefix}objective"] = polychromic_value(rewards, of_judge, set_size)
        if len(ids) > 1:
            judged = [degenerate_as_singletons(of_judge) for of_judge in ids]
            found |= {
                "adjusted_rand_index": adjusted_rand_index(*judged),
                "pairwise_agreement": pairwise_agreement(*judged),
            }
            pairs.append((found["clusters"], found["auditor_clusters"]))
        for name, value in found.items():
            values[name] += [] if value is None else [value]
    bounds = {"adjusted_rand_index": RAND_BOUNDS, **dict.fromkeys(FRACTIONS, (0.0, 1.0))}
    of_metrics = {name: mean_over_problems(found, bounds.get(name)) for name, found in values.items()}
    return of_metrics | {"inflation": ratio_over_problems(pairs)}


def ratio_over_problems(pairs: Sequence[tuple[int, int]]) -> dict[str, Any] | None:
    """Returns the ratio of two sums over problems, with its 95% interval, or None if the second sum is 0.

    The interval is the bootstrap interval of the mean of r + (x - r y) / mean(y), where r is the ratio: to first order,
    the mean of these values deviates from r as the ratio deviates from its expectation. A negative end is set to 0.

    Args:
      pairs: Counts x and y of each problem.
    """
    x, y = np.array(pairs, float).reshape(-1, 2).T
    if not y.sum():
        return None
    ratio = x.sum() / y.sum()
    found = mean_over_problems((ratio + (x - ratio * y) / y.mean()).tolist())
    return found and found | {"low": found["low"] and max(found["low"], 0.0)}
