"""Simulates the installation of a user: the requirements of setup.py without its extras."""

import functools
import importlib.metadata
import sysconfig
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SITE = Path(__file__).parent / "user_install"
"""Folder for PYTHONPATH, whose sitecustomize.py hides the modules named in POLY_EPO_HIDDEN_MODULES."""


def user_variables(*also: str, path: str = "") -> dict[str, str]:
    """Returns environment variables of a process that only finds the packages of a user.

    Args:
      also: Packages that the user has installed in addition, such as the packages of an extra.
      path: Additional folder from which modules can be imported.
    """
    hidden = " ".join(sorted(_hidden_modules(*also)))
    return {"POLY_EPO_HIDDEN_MODULES": hidden, "PYTHONPATH": f"{SITE}:{path}" if path else str(SITE)}


@functools.cache
def _hidden_modules(*also: str) -> frozenset[str]:
    """Returns the top-level modules of installed packages that the user does not have."""
    installed = _installed()
    hidden = installed.keys() - {"pip"}.union(*(_required(name, installed) for name in ("poly-epo-jax", *also)))
    owners = importlib.metadata.packages_distributions()
    return frozenset(module for module, names in owners.items() if hidden.issuperset(map(canonicalize_name, names)))


def _installed() -> dict[str, importlib.metadata.Distribution]:
    """Returns the packages of the environment. Packages in other folders of sys.path, as in setuptools, are omitted."""
    folder = sysconfig.get_path("purelib")
    return {canonicalize_name(found.name): found for found in importlib.metadata.distributions(path=[folder])}


def _required(name: str, installed: dict[str, importlib.metadata.Distribution]) -> set[str]:
    """Returns the names of a package and of all its direct and indirect requirements in this environment."""
    seen: set[tuple[str, str]] = set()
    waiting = [(name, "")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        lines = installed[name].requires if name in installed else None
        for requirement in map(Requirement, lines or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(requirement.name), wanted) for wanted in ("", *requirement.extras)]
    return {name for name, _ in seen}
