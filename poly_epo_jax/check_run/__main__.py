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
from poly_epo_jax.config.recipes import recipes
from poly_epo_jax.config.section import flat
from poly_epo_jax.records import run_folder
from poly_epo_jax.startup.config_file import load_config
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.system.output_folder import check_contents
from poly_epo_jax.system.signals import exit_code


def check_run(run: Path, recipe: str = "") -> bool:
    """Compares a run with its recipe, and prints the result.

    Args:
      run: The run folder. The run may be in progress.
      recipe: Value of --config. If empty, the project's recipe with the name of the task, with Poly-EPO.

    Returns:
      Whether all keys are those of the recipe, and no value is outside its band.

    Raises:
      FileNotFoundError: If the folder contains no run.
      ValueError: If the recipe does not exist, a file of the run is corrupted, or the folder contains links.
    """
    check_contents(run)
    config = run_folder.read_config(run)
    # The folder may come from another person, so that only a recipe of the project is executed without --config.
    own, name = recipes("configs", only_of_project=True), recipe or str(flat(config).get("task.name"))
    if not recipe and name not in own:
        raise ValueError(
            f"{run / run_folder.CONFIG} has task.name={name!r}, which is not the name of a recipe of the project; set "
            "--config to the recipe of the run."
        )
    expected = json.loads(json.dumps(read_config(load_config(recipe or str(own[name])), training=False).to_dict()))
    changed = differing_keys(config, expected)
    differs = f"differs in {len(changed)} of {len(flat(expected))} keys from" if changed else "as in"
    print(f"configuration: {differs} the recipe {name}")
    for key, (found, wanted) in changed.items():
        print(f"  {repr(key)[1:-1]}: {found!r} instead of {wanted!r}")  # a key may contain control characters
    bands = find_bands(expected)
    if bands and differing_keys(bands.config, expected):
        bands = None
    compared = bands.compare(run_folder.read_rows(run / run_folder.METRICS)) if bands else []
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
        "--config",
        default="",
        metavar="FILE",
        help="recipe, or FILE:METHOD,MACHINE (default: the recipe named after the task)",
    )

    def work() -> int:
        options = parser.parse_args(arguments)
        return 0 if check_run(options.run, options.config) else 1

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
