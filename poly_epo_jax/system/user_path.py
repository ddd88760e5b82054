"""Reads paths that users type in flags and study files."""

from pathlib import Path


def user_path(text: str) -> Path:
    """Returns the path of a flag such as `--output=~/FOLDER`, in which shells do not expand the ~."""
    return Path(text).expanduser()
