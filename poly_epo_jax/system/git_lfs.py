"""Detects Git LFS pointers: small text files in a clone whose contents were not downloaded."""

from pathlib import Path

_FIRST_LINE = b"version https://git-lfs.github.com/spec/"


def check_downloaded(file: Path) -> None:
    """Checks that a file is not a Git LFS pointer.

    Raises:
      ValueError: If the file is a pointer.
      OSError: If the file cannot be read.
    """
    with file.open("rb") as content:
        if content.read(len(_FIRST_LINE)) == _FIRST_LINE:
            raise ValueError(f"{file} is a Git LFS pointer without the contents; run git lfs pull in its repository.")
