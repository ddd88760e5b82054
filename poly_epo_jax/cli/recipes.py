"""Lists the recipes, which are the configuration and study files of the project, or prints one of them.

    poly-epo recipes
    poly-epo recipes show smollm2 > my.py          a configuration file, to change and to use with --config=my.py
    poly-epo recipes show --study skewed > my.py   a study file, for poly-epo study my.py

Files in configs/ and studies/ of the working folder take precedence over those of the project.
"""

import argparse
import ast
import sys
from collections.abc import Sequence

from poly_epo_jax.config.recipes import Kind, find_file, recipes
from poly_epo_jax.system.signals import exit_code

USES: dict[Kind, str] = {
    "configs": "Configurations, for poly-epo train --config=NAME or --config=NAME:METHOD,MACHINE",
    "studies": "Studies, for poly-epo study NAME",
}
"""Heading of each kind of recipes in the list."""


def list_recipes() -> str:
    """Returns the name, first line and path of each recipe."""
    lines = []
    for kind, use in USES.items():
        lines += ["", f"{use}:"]
        for name, path in recipes(kind).items():
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            lines += [f"  {name:<15} {docstring.partition(chr(10))[0]}", f"  {'':<15} {path}"]
    return "\n".join(lines[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (`sys.argv` if None). Returns the exit code: 2 after an error."""
    parser = argparse.ArgumentParser(
        "poly-epo recipes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    show = parser.add_subparsers(dest="action", metavar="show").add_parser("show", help="print a recipe")
    show.add_argument("name", metavar="NAME", help="name of the recipe")
    show.add_argument("--study", action="store_true", help="print a study file instead of a configuration file")

    def work() -> None:
        options = parser.parse_args(arguments)
        if options.action == "show":
            kind: Kind = "studies" if options.study else "configs"
            print(find_file(options.name, kind).read_text(encoding="utf-8"), end="")
        else:
            print(list_recipes())

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
