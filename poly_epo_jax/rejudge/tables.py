"""Titles and meanings of the results, and the tables that the command prints."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from poly_epo_jax.metrics.intervals import interval_text

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
