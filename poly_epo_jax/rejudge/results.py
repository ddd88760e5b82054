"""Compares the clusterings of judges: validity, agreement, stability, and their effect on the advantages."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from rich.table import Table

from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.judges.variants import FIRST, Variant
from poly_epo_jax.metrics.agreement import RAND_BOUNDS, adjusted_rand_index, degenerate_as_singletons, v_measure
from poly_epo_jax.metrics.diversity import num_clusters
from poly_epo_jax.metrics.intervals import interval_text, mean_over_problems
from poly_epo_jax.records.recorded_groups import RecordedGroup
from poly_epo_jax.step.advantages import ZERO, make_advantages, make_estimator
from poly_epo_jax.system.json_files import Row
from poly_epo_jax.types import DEGENERATE_CLUSTER, Problem

RESULTS, RECORDED, REFERENCE = "results.json", "recorded", "reference"
"""Labels of the clusters in the input, and of the clusters in the sheet of --reference."""

Clusters = Mapping[str, np.ndarray]
"""Cluster ids [N] by name of the group."""
Rows = Mapping[Variant, Mapping[str, Row]]
"""Rows of clusterings.jsonl by variant and name of the group."""


def clusters_in(rows: Mapping[str, Row]) -> dict[str, np.ndarray]:
    """Returns the cluster ids of the groups on which the judge did not fail."""
    return {name: np.array(row["clusters"], int) for name, row in rows.items() if row["clusters"] is not None}


def advantages_of(config: Config, groups: Sequence[RecordedGroup]) -> Callable[[str, np.ndarray], np.ndarray] | None:
    """Returns a function of the name of a group and its cluster ids [N] that returns the advantages [N].

    Returns None, and prints the reason, if the method does not read clusters, or reads values that are not recorded.

    Raises:
      ConfigError: If a problem does not have enough responses for the method.
    """
    estimator = make_estimator(config.algo)
    if "clusters" not in estimator.reads or not {*estimator.reads} <= {"clusters", "rewards"}:
        print(f"Advantages are not compared, because {estimator.title} reads {', '.join(estimator.reads)}.")
        return None
    smallest = min(groups, key=lambda group: len(group.responses))
    minimum = max(estimator.min_generations, config.algo.set_size + 1)
    if len(smallest.responses) < minimum:
        raise ConfigError(
            f"{estimator.title} with algo.set_size={config.algo.set_size} requires {minimum} responses, but "
            f"{smallest.name!r} has {len(smallest.responses)}; lower algo.set_size, or leave out this problem."
        )
    compiled = make_advantages(config.algo, config.seed)
    rewards_of = {group.name: np.array([group.rewards], np.float32) for group in groups}

    def advantages(name: str, ids: np.ndarray) -> np.ndarray:
        return compiled(
            0, [Problem(name, "", "")], {"rewards": rewards_of[name], "clusters": ids[None].astype(np.int32)}
        )[0]

    return advantages


def judge_results(rows: Rows, wanted: Sequence[Variant]) -> dict[str, Any]:
    """Computes the results of a judge.

    Args:
      rows: Clusterings of the judge.
      wanted: Variants that are compared. The first is `FIRST`.

    Returns:
      "num_problems", "failures" (numbers of failed requests of the first variant by kind), and means over problems,
      see `mean_over_problems`: "valid" (fraction of problems with a valid clustering), "degenerate" (fraction of
      degenerate responses), "clusters" (number of distinct clusters, without the degenerate one), "seed_agreement"
      (adjusted Rand index with the clusterings of other seeds) and "order_sensitivity" (1 minus the adjusted Rand index
      with the clusterings of other orders). The last two are None without other seeds or orders.
    """
    first = rows[FIRST]
    clusters = clusters_in(first)
    degenerate = [ids == DEGENERATE_CLUSTER for ids in clusters.values()]
    distinct = [num_clusters(ids) for ids in clusters.values()]
    failures = Counter(row["failure"] for row in first.values() if row["failure"])
    others = {variant: clusters_in(rows[variant]) for variant in wanted if variant != FIRST}
    by_seed = _agreements(clusters, [found for variant, found in others.items() if variant.seed])
    by_order = _agreements(clusters, [found for variant, found in others.items() if variant.order])
    return {
        "num_problems": len(first),
        "failures": dict(sorted(failures.items())),
        "valid": mean_over_problems([name in clusters for name in first], (0.0, 1.0)),
        "degenerate": mean_over_problems([is_degenerate.mean() for is_degenerate in degenerate], (0.0, 1.0)),
        "clusters": mean_over_problems(distinct),
        "seed_agreement": mean_over_problems(by_seed, RAND_BOUNDS),
        "order_sensitivity": mean_over_problems([1 - value for value in by_order], (0.0, 1.5)),
    }


def pair_results(
    first: Clusters,
    second: Clusters,
    names: Sequence[str],
    advantages: Callable[[str, Int[np.ndarray, " N"]], Float[np.ndarray, " N"]] | None,
) -> dict[str, Any]:
    """Compares two clusterings of the same groups.

    Args:
      first: Clusters of the first judge.
      second: Clusters of the second judge.
      names: Names of the groups that are compared.
      advantages: Function that maps the name of a group and cluster ids [N] to advantages [N]. If None, advantages are
        not compared.

    Returns:
      "num_problems", and means over problems, see `mean_over_problems`: "adjusted_rand_index" and "v_measure", with
      each degenerate response as its own cluster, "rank_correlation" (Spearman) of the advantages, over the problems
      whose advantages differ between responses with both clusterings, and "sign_changes" (fraction of responses whose
      advantage has another sign).
    """
    pairs = [(degenerate_as_singletons(first[name]), degenerate_as_singletons(second[name])) for name in names]
    found: dict[str, Any] = {
        "num_problems": len(names),
        "adjusted_rand_index": mean_over_problems([adjusted_rand_index(*pair) for pair in pairs], RAND_BOUNDS),
        "v_measure": mean_over_problems([v_measure(*pair) for pair in pairs], (0.0, 1.0)),
    }
    if advantages is None:
        return found
    from scipy.stats import rankdata  # takes a second, which all commands would need

    correlations, changes = [], []
    for name in names:
        pair = np.stack([advantages(name, judged[name]).astype(float) for judged in (first, second)])
        left, right = np.where(np.abs(pair) <= ZERO, 0, pair.round(6))
        changes.append((np.sign(left) != np.sign(right)).mean())
        if np.ptp(left) and np.ptp(right):
            correlations.append(np.corrcoef(rankdata(left), rankdata(right))[0, 1])
    return found | {
        "rank_correlation": mean_over_problems(correlations, (-1.0, 1.0)),
        "sign_changes": mean_over_problems(changes, (0.0, 1.0)),
    }


def compare(
    judged: Mapping[str, Clusters],
    reference: Clusters | str | None,
    advantages: Callable[[str, Int[np.ndarray, " N"]], Float[np.ndarray, " N"]] | None,
) -> dict[str, Any]:
    """Compares judges with each other and with a reference.

    Args:
      judged: Clusters by label of the judge.
      reference: Clusters of a sheet, with which each judge is compared in addition to all pairs of judges. If it is the
        label of a judge, only pairs with this judge are compared. If None, all pairs are.
      advantages: See `pair_results`.

    Returns:
      "num_shared": number of problems with a valid clustering of all judges, which all pairs of judges compare.
      "pairs": results of each pair with the labels "first" and "second". A sheet is compared on the shared problems
      that it contains.
    """
    shared = [name for name in next(iter(judged.values())) if all(name in clusters for clusters in judged.values())]
    labels = [pair for pair in combinations(judged, 2) if not isinstance(reference, str) or reference in pair]
    pairs = [
        {"first": first, "second": second, **pair_results(judged[first], judged[second], shared, advantages)}
        for first, second in labels
    ]
    if isinstance(reference, Mapping):
        names = [name for name in shared if name in reference]
        pairs += [
            {"first": label, "second": REFERENCE, **pair_results(clusters, reference, names, advantages)}
            for label, clusters in judged.items()
        ]
    return {"num_shared": len(shared), "pairs": pairs}


def _agreements(clusters: Clusters, others: Sequence[Clusters]) -> list[float]:
    """Returns the mean agreement of each problem with other clusterings, without failed ones."""
    found = [mean_agreement(name, [(clusters, other) for other in others]) for name in clusters]
    return [value for value in found if value is not None]


def mean_agreement(name: str, pairs: Iterable[tuple[Clusters, Clusters]]) -> float | None:
    """Returns the mean adjusted Rand index of a group over pairs of clusterings, with singletons for degenerate ids.

    Args:
      name: Name of the group.
      pairs: Pairs of clusterings. Pairs that lack the group are left out. If none is left, the result is None.
    """
    found = [
        [degenerate_as_singletons(one[name]) for one in pair] for pair in pairs if all(name in one for one in pair)
    ]
    return float(np.mean([adjusted_rand_index(*pair) for pair in found])) if found else None


JUDGE_COLUMNS = {
    "valid": ("valid", "Fraction of problems with a valid clustering, which includes retried requests."),
    "degenerate": ("degenerate", "Fraction of responses in the degenerate cluster, 100."),
    "clusters": ("clusters", "Number of distinct clusters per problem, without the degenerate cluster."),
    "seed_agreement": (
        "agreement between seeds",
        "Adjusted Rand index of the clusterings with different seeds of the judge. 1: the seed has no effect.",
    ),
    "order_sensitivity": (
        "sensitivity to order",
        "1 minus the adjusted Rand index of the clusterings of permuted responses. 0: the order has no effect. For a "
        "judge that samples, compare it with 1 minus the agreement between seeds.",
    ),
}
"""Title and meaning of the results of a judge."""

PAIR_COLUMNS = {
    "adjusted_rand_index": (
        "adjusted Rand index",
        "Agreement on the pairs of responses that share a cluster, adjusted for chance: 1 for equal clusterings, 0 for "
        "random ones. Each degenerate response is its own cluster.",
    ),
    "v_measure": (
        "V-measure",
        "Harmonic mean of homogeneity and completeness. It is not adjusted for chance. Each degenerate response is its "
        "own cluster.",
    ),
    "rank_correlation": (
        "rank correlation",
        "Spearman correlation of the advantages of a problem's responses, over the problems whose advantages are not "
        "all equal.",
    ),
    "sign_changes": (
        "sign changes",
        "Fraction of responses whose advantage has another sign (positive, 0 or negative).",
    ),
}
"""Title and meaning of the results of a pair of judges."""


def console_tables(results: Mapping[str, Any]) -> list[Table]:
    """Returns a table of the judges and a table of all pairs, within 80 columns."""
    judges = Table("result", "judge", "mean [95% interval]", title=f"{results['num_problems']} problems")
    for name, (title, _) in JUDGE_COLUMNS.items():
        found = {label: of_judge[name] for label, of_judge in results["judges"].items()}
        for label, value in found.items() if any(found.values()) else ():  # no lines for a single seed or order
            judges.add_row(title, label, interval_text(value))
        judges.add_section()
    pairs = Table(
        "result", "judges", "mean [95% interval]", title=f"{results['num_shared']} problems with all clusterings"
    )
    for name, (title, _) in PAIR_COLUMNS.items():
        for pair in results["pairs"]:
            if name in pair:
                pairs.add_row(title, f"{pair['first']}, {pair['second']}", interval_text(pair[name]))
        pairs.add_section()
    return [judges, pairs] if results["pairs"] else [judges]
