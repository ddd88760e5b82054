"""Simulates the installation of a user: the requirements in pyproject.toml of one extra, or without extras."""

import functools
import importlib.metadata
import sysconfig
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SITE = Path(__file__).parent / "user_install"
"""Folder for PYTHONPATH, whose sitecustomize.py hides the modules named in POLY_EPO_HIDDEN_MODULES."""

PROJECT: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
"""Metadata of the package."""


def user_variables(*also: str, path: str = "", extra: str = "train") -> dict[str, str]:
    """Returns environment variables of a process that only finds the packages of a user.

    Args:
      also: Packages that the user has installed in addition, such as the packages of another extra.
      path: Additional folder from which modules can be imported.
      extra: The extra that the user has installed. If empty, no extra.
    """
    hidden = " ".join(sorted(_hidden_modules(extra, *also)))
    return {"POLY_EPO_HIDDEN_MODULES": hidden, "PYTHONPATH": f"{SITE}:{path}" if path else str(SITE)}


def requirements(extra: str = "") -> list[Requirement]:
    """Returns the direct requirements of the package with an extra, or without extras if `extra` is empty."""
    lines = PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else [])
    return [Requirement(line) for line in lines]


@functools.cache
def _hidden_modules(extra: str, *also: str) -> frozenset[str]:
    """Returns the top-level modules of installed packages that the user does not have."""
    installed = _installed()
    wanted = [*requirements(extra), *map(Requirement, also)]
    # setuptools contains a copy of wheel, which would be hidden too. uv installs wheel for Python 3.11.
    kept = {"pip", "wheel", canonicalize_name(PROJECT["name"])}
    hidden = installed.keys() - kept - _closure(wanted, installed)
    owners = importlib.metadata.packages_distributions()
    return frozenset(module for module, names in owners.items() if hidden.issuperset(map(canonicalize_name, names)))


def _installed() -> dict[str, importlib.metadata.Distribution]:
    """Returns the packages of the environment. Packages in other folders of sys.path, as in setuptools, are omitted."""
    folder = sysconfig.get_path("purelib")
    return {canonicalize_name(found.name): found for found in importlib.metadata.distributions(path=[folder])}


def _closure(wanted: Iterable[Requirement], installed: dict[str, importlib.metadata.Distribution]) -> set[str]:
    """Returns the names of packages and of all their direct and indirect requirements in this environment."""
    seen: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(found.name), extra) for found in wanted for extra in ("", *found.extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        lines = installed[name].requires if name in installed else None
        for requirement in map(Requirement, lines or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(requirement.name), part) for part in ("", *requirement.extras)]
    return {name for name, _ in seen}
