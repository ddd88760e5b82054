"""Measures what the paper's theory says on bandits: python benchmarks/theory; docs/theory.md has the outcome.

Writes figures.json and theory.png to --output, and prints a table for each question. Nothing is trained but tabular
policies; a minute or two on two cores.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks/theory", description="See docs/theory.md.")
    parser.add_argument("--output", type=Path, default=Path("runs/theory"), help="where figures.json and theory.png go")
    arguments = parser.parse_args()
    sys.path[:0] = [str(HERE.parents[1]), str(HERE)]  # this tree's package, and the files beside this one

    import jax

    jax.config.update("jax_enable_x64", True)  # errors of the lemma are smaller than float32's

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
    for name, ask in questions.items():
        found[name] = [{key: _plain(value) for key, value in row.items()} for row in ask()]
        print(f"\n{name}\n{as_table(found[name])}", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    figure.draw(found).savefig(arguments.output / "theory.png")
    print(f"Written to {arguments.output}.")


def as_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown, numbers to three places."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(value: Any) -> Any:
    """Of NumPy's numbers, Python's."""
    return value.item() if hasattr(value, "item") else value


if __name__ == "__main__":
    main()
