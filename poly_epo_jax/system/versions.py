"""Which software a process runs: what a run's numbers may depend on besides configuration and seed. Imports no JAX."""

import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path

PACKAGES = ("poly_epo_jax", "jax", "jaxlib", "flax", "optax", "numpy")

Versions = dict[str, str]


def versions() -> Versions:
    """Python's version, those of `PACKAGES`, and the commit of the repository that the command was started in.

    The commit ends in `+` if files of the repository differ from it, and is empty if there is no repository.
    """
    found = {name: _installed(name) for name in PACKAGES}
    return {"python": platform.python_version(), **found, "commit": commit(Path.cwd())}


def commit(folder: Path) -> str:
    """The abbreviated commit of a folder's repository, with `+` if tracked files differ from it."""
    described = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"]
    try:
        return subprocess.run(described, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):  # no git, or a disk that does not answer
        return ""


def versions_used(about: Path, now: Versions) -> list[Versions]:
    """The versions that the run of an about.json has been trained with so far, each once, and the current ones."""
    try:
        before = json.loads(about.read_text(encoding="utf-8"))["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        before = []
    return [*(one for one in before if one != now), now]


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
