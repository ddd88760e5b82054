"""Tests the statements of the paper's theory on bandits: python benchmarks/theory

Writes figures.json and theory.png to --output, and prints a table for each question. Only tabular policies are trained.
Takes one to two minutes on two cores. docs/explanation/theory.md discusses the results.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> None:
    """Answers all questions, and writes and prints the results."""
    parser = argparse.ArgumentParser(prog="python benchmarks/theory", description="See docs/explanation/theory.md.")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/theory"), help="folder for figures.json and theory.png"
    )
    arguments = parser.parse_args()
    sys.path[:0] = [
        str(HERE.parents[1]),
        str(HERE),
    ]  # Allows importing this repository's package and the modules in this folder.

    import jax

    jax.config.update("jax_enable_x64", True)  # The errors of the lemma are smaller than float32 rounding.

    import clipping
    import figure
    import frontier
    import lemma
    import sampled_sets
    import shares

    questions = {
        "lemma": lemma.run,
        "thresholds": shares.thresholds,
        "own thresholds": shares.own_thresholds,
        "kinds": shares.kinds,
        "sizes": shares.sizes,
        "sampled sets": sampled_sets.run,
        "frontier": frontier.run,
        "edge": frontier.edge,
        "clipping": clipping.run,
        "credit": shares.curves,
        "weights": clipping.weights,
    }
    found = {}
    for name, answer in questions.items():
        found[name] = [{key: _plain(value) for key, value in row.items()} for row in answer()]
        print(f"\n{name}\n{as_table(found[name])}", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    figure.draw(found).savefig(arguments.output / "theory.png")
    print(f"Written to {arguments.output}.")


def as_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats rows as a Markdown table, with three significant digits."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(value: Any) -> Any:
    """Converts NumPy scalars to Python numbers."""
    return value.item() if hasattr(value, "item") else value


if __name__ == "__main__":
    main()
