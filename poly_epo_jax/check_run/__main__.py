"""Checks whether a run is a run of its recipe: its configuration, and its curves in bands of several seeds.

    poly-epo check-run runs/polynomial-poly_epo
    poly-epo check-run runs/polynomial-grpo --config=polynomial:grpo

First, the keys that differ from the recipe are printed. Then reward, distinct correct strategies, pass@8, entropy and
truncation are compared with the bands, as far as the run has come. The exit code is 1 if a key differs or a value is
outside its band. There are bands for Poly-EPO on some of the tiny tasks only.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from poly_epo_jax.check_run.bands import differing_keys, find_bands, summary
from poly_epo_jax.config.keys import Config
from poly_epo_jax.config.section import read_section
from poly_epo_jax.records.run_folder import METRICS, read_config, read_rows
from poly_epo_jax.startup.config_file import load_config
from poly_epo_jax.system.signals import exit_code


def check_run(run: Path, recipe: str = "") -> bool:
    """Compares a run with its recipe, and prints the result.

    Args:
      run: The run folder. The run may be in progress.
      recipe: Value of --config. If empty, the recipe with the name of the task, with Poly-EPO.

    Returns:
      Whether all keys are those of the recipe, and no value is outside its band.

    Raises:
      FileNotFoundError: If the folder contains no run.
      ValueError: If the recipe does not exist, or a file of the run is corrupted.
    """
    config = read_config(run)
    recipe = recipe or config["task"]["name"]
    expected = json.loads(json.dumps(read_section(Config, load_config(recipe).to_dict()).to_dict()))
    changed = differing_keys(config, expected)
    print(f"configuration: {f'{len(changed)} keys differ from' if changed else 'as in'} the recipe {recipe}")
    for key, (found, wanted) in changed.items():
        print(f"  {key}: {found!r} instead of {wanted!r}")
    bands = find_bands(expected)
    compared = bands.compare(read_rows(run / METRICS)) if bands else []
    print(f"curves: {summary(bands, compared)}")
    for one in compared:
        print("  step {:<5} {:<40} {:>10}  {:>18}  {}".format(*one.cells()))
    return not changed and all(one.is_inside for one in compared)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (`sys.argv` if None). Returns 1 if the run differs, and 2 after an error."""
    parser = argparse.ArgumentParser(
        "poly-epo check-run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--config", default="", metavar="FILE", help="recipe, or FILE:METHOD,MACHINE (default: that of the task)"
    )

    def work() -> int:
        options = parser.parse_args(arguments)
        return 0 if check_run(options.run, options.config) else 1

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
