"""Software versions, which affect the results of a run in addition to configuration and seed. Does not import JAX."""

import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path

PACKAGES = ("poly_epo_jax", "jax", "jaxlib", "flax", "optax", "numpy")

Versions = dict[str, str]


def versions() -> Versions:
    """Returns the versions of Python and of `PACKAGES`, and the commit of the current folder's repository.

    The commit ends in `+` if tracked files differ from it, and is empty outside of a repository.
    """
    return {
        "python": platform.python_version(),
        **{name: installed_version(name) for name in PACKAGES},
        "commit": commit(Path.cwd()),
    }


def commit(folder: Path) -> str:
    """Returns the abbreviated commit of a folder's repository, with `+` if tracked files differ from it.

    Returns an empty string if the folder is not in a repository, or if git is not installed or does not respond.
    """
    described = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"]
    try:
        return subprocess.run(described, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):  # git is not installed, or the disk does not respond
        return ""


def versions_used(about: Path, now: Versions) -> list[Versions]:
    """Returns the distinct versions that a run was trained with, including the current versions.

    Args:
      about: The about.json of the run.
      now: Current versions. They come last.
    """
    try:
        before = json.loads(about.read_text(encoding="utf-8"))["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        before = []
    return [*(earlier for earlier in before if earlier != now), now]


def installed_version(name: str) -> str:
    """Returns the version of an installed package, or an empty string if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
