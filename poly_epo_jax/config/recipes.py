"""Finds recipes by name. Recipes are the configuration and study files of the project: configs/polynomial.py, ...

They are executed as files and not imported, so that users can copy and change them. Does not import other packages.
"""

import difflib
from pathlib import Path
from typing import Literal

from poly_epo_jax.config.checks import ConfigError

Kind = Literal["configs", "studies"]
"""Folder of the repository with recipes of one kind: configuration files or study files."""

_PACKAGE = Path(__file__).parents[1]
_IN_WHEEL: dict[Kind, Path] = {"configs": _PACKAGE / "recipes", "studies": _PACKAGE / "recipes" / "studies"}


def recipes(kind: Kind, only_of_project: bool = False) -> dict[str, Path]:
    """Returns the recipes of a kind by name, in alphabetical order.

    Files in the folder `kind` of the working folder take precedence over those of the project, which are in the package
    if it was installed from a wheel, and otherwise in the repository that contains the package.

    Args:
      kind: Kind of the recipes.
      only_of_project: Whether files of the working folder are ignored.
    """
    of_project = _IN_WHEEL[kind] if _IN_WHEEL[kind].is_dir() else _PACKAGE.parent / kind
    folders = (of_project,) if only_of_project else (of_project, Path(kind))
    return dict(sorted({path.stem: path for folder in folders for path in folder.glob("*.py")}.items()))


def find_file(text: str, kind: Kind) -> Path:
    """Returns the path of a configuration or study file.

    Args:
      text: Path of the file, or the name of a recipe. Names contain no slash and do not end in .py.
      kind: Kind of the recipes.

    Raises:
      ConfigError: If the file or recipe does not exist. The message lists the available files or recipes.
    """
    path = Path(text)
    if "/" in text or text.endswith(".py"):
        if not path.is_file():
            folder = path if path.is_dir() else path.parent
            found = ", ".join(sorted(found.name for found in folder.glob("*.py"))) or "none"
            raise ConfigError(f"{text} is not a file; correct the path. Python files in {folder}: {found}.")
        return path
    known = recipes(kind)
    if text not in known:
        near = difflib.get_close_matches(text, known, 1)
        hint = f"did you mean {near[0]}?" if near else "choose a recipe, or write the path of a file, with its .py."
        raise ConfigError(f"There is no recipe {text}; {hint} Recipes in {kind}: {', '.join(known) or 'none'}.")
    return known[text]
