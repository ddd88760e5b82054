"""What a user has installed: setup.py's requirements, without those of its extras."""

import functools
import importlib.metadata
import sysconfig
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SITE = Path(__file__).parent / "user_install"
"""A folder for PYTHONPATH, where a sitecustomize.py hides the modules that POLY_EPO_HIDDEN_MODULES names."""


def user_variables(*also: str, path: str = "") -> dict[str, str]:
    """Environment variables of a process that finds what a user's does, and the modules in the folder `path`.

    Args:
      also: packages that this user has besides, such as those of an extra.
    """
    hidden = " ".join(sorted(_hidden_modules(*also)))
    return {"POLY_EPO_HIDDEN_MODULES": hidden, "PYTHONPATH": f"{SITE}:{path}" if path else str(SITE)}


@functools.cache
def _hidden_modules(*also: str) -> frozenset[str]:
    """The top-level modules of installed packages that this user does not have."""
    installed = _installed()
    needless = installed.keys() - {"pip"}.union(*(_required(name, installed) for name in ("poly-epo-jax", *also)))
    owners = importlib.metadata.packages_distributions()
    return frozenset(module for module, names in owners.items() if needless.issuperset(map(canonicalize_name, names)))


def _installed() -> dict[str, importlib.metadata.Distribution]:
    """Of the environment: other folders of sys.path have packages, too, such as those inside of setuptools."""
    folder = sysconfig.get_path("purelib")
    return {canonicalize_name(found.name): found for found in importlib.metadata.distributions(path=[folder])}


def _required(name: str, installed: dict[str, importlib.metadata.Distribution]) -> set[str]:
    """The names of a package and of all that it requires here, directly or not."""
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
