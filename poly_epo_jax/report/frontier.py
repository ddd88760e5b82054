"""Compares finished runs of several methods, learning rates and seeds: where each ended, as a figure and a table.

    python -m poly_epo_jax.report.frontier RUN RUN ... [--output DIR]

writes frontier.png and frontier.md; launch/sweep.sh makes such runs.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from poly_epo_jax.metrics import names
from poly_epo_jax.report import figures
from poly_epo_jax.run_folder import METRICS, read_config, read_method, read_rows

COLUMNS = {
    names.HELD_OUT_REWARD: "reward",
    names.HELD_OUT_CORRECT_CLUSTERS: "correct clusters of 8",
    names.held_out(names.at(names.CORRECT_CLUSTERS, 64)): "of 64",
    names.held_out(names.at(names.INCORRECT_CLUSTERS, 8)): "incorrect of 8",
    names.held_out(names.at(names.PASS, 8)): "pass@8",
}
Results = Mapping[tuple[str, float], list[Mapping[str, Any]]]
"""By method and learning rate, the last evaluation of each seed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line (`sys.argv` if None) and returns the exit code: 2 if there is nothing to compare."""
    parser = argparse.ArgumentParser("python -m poly_epo_jax.report.frontier", description="Compare finished runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write; default: beside the first RUN")
    options = parser.parse_args(arguments)
    output = options.output or options.runs[0].resolve().parent
    try:
        results = read_results(options.runs)
        output.mkdir(parents=True, exist_ok=True)
        points = defaultdict(list)
        for (method, rate), seeds in results.items():
            points[method] += [
                (rate, row[names.HELD_OUT_CORRECT_CLUSTERS], row[names.HELD_OUT_REWARD]) for row in seeds
            ]
        figures.frontier(points).savefig(output / "frontier.png")
        (output / "frontier.md").write_text(table(results))
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(f"frontier: {output / 'frontier.png'}, {output / 'frontier.md'}")
    return 0


def read_results(runs: Sequence[Path]) -> Results:
    """The last evaluation of each run, by method and learning rate, methods in the order of their first runs.

    Raises:
      FileNotFoundError: a folder is no run.
      ValueError: a run has not been evaluated yet, or does not name its method.
    """
    results = defaultdict(list)
    for run in runs:
        rate = read_config(run)["optimizer"]["learning_rate"]
        evaluated = [row for row in read_rows(run / METRICS) if names.HELD_OUT_CORRECT_CLUSTERS in row]
        if not evaluated:
            raise ValueError(
                f"{run} has no evaluation with 8 or more generations; set eval.every and eval.num_generations."
            )
        results[read_method(run), rate].append(evaluated[-1])
    methods = list(dict.fromkeys(method for method, _ in results))
    return dict(sorted(results.items(), key=lambda item: (methods.index(item[0][0]), item[0][1])))


def table(results: Results) -> str:
    """A Markdown table with a row per method and rate: the mean over seeds, and their range where there are several."""
    lines = [
        f"| method | learning rate | seeds | {' | '.join(COLUMNS.values())} |",
        f"|---|---|---|{'---|' * len(COLUMNS)}",
    ]
    for (method, rate), seeds in results.items():
        cells = [_cell([row.get(metric) for row in seeds]) for metric in COLUMNS]
        lines.append(f"| {method} | {rate:g} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"  # of more generations than a run was evaluated with
    mean, low, high = (f"{value:.3g}" for value in (np.mean(known), min(known), max(known)))
    return mean if low == high else f"{mean} ({low} to {high})"


if __name__ == "__main__":
    sys.exit(main())
