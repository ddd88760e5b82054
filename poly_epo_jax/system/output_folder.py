"""Output folders of commands. A command only writes to a folder that is new, empty, or from an earlier command.

The lock file identifies a folder of this package and its kind, such as a run. Folders may come from other people, so
that links inside of a folder are rejected: a command would write to, delete or read files elsewhere.
"""

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from poly_epo_jax.system.file_lock import lock_file

LOCK = "lock"


@contextlib.contextmanager
def claim_folder(folder: Path, kind: str, is_known: bool = False) -> Iterator[None]:
    """Creates or reuses an output folder, and locks it for this process. Other processes may still read it.

    Args:
      folder: The folder.
      kind: Kind of the content, such as "run". The lock file records it.
      is_known: Whether files other than the lock file identify the content.

    Raises:
      ValueError: If the folder contains other files or links, see `check_output`.
      InUseError: If another process holds the lock.
      OSError: If the folder cannot be written.
    """
    check_output(folder, kind, is_known)
    with lock_file(folder / LOCK, f"the {kind} {folder}", kind=kind):
        yield


def check_output(folder: Path, kind: str, is_known: bool = False) -> None:
    """Checks that an output folder is new, empty, or has content of this package, and does not contain links.

    Args:
      folder: The folder. It may not exist yet.
      kind: Kind of the content that is accepted.
      is_known: Whether files other than the lock file identify the content.

    Raises:
      ValueError: If the folder contains other files or links.
    """
    names = sorted({*os.listdir(folder)} - {LOCK}) if folder.is_dir() else []
    # Lock files of earlier versions do not contain the kind.
    if names and not is_known and not starts_with(folder / LOCK, rf"\Aprocess \d+ on \S+( \({kind}\)|\Z)"):
        raise ValueError(
            f"{folder} contains {names[0]!r}, but no {kind} of this package; choose a new or empty folder."
        )
    check_contents(folder)


def starts_with(path: Path, pattern: str) -> bool:
    """Returns True if a regular expression matches in the first 1,000 characters of a file, which may not exist."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open(errors="replace") as file:
        return re.search(pattern, file.read(1000)) is not None


def check_contents(folder: Path, targets: Sequence[Path] = ()) -> None:
    """Checks that a folder contains only files and folders. Links, pipes and devices are rejected.

    Args:
      folder: The folder.
      targets: Folders without links, to whose files the folder may link.

    Raises:
      ValueError: If the folder contains another type of file.
    """
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            with contextlib.suppress(FileNotFoundError):  # deleted by a run in progress
                real = Path(os.path.realpath(path))
                is_plain = stat.S_IFMT(path.lstat().st_mode) in (stat.S_IFREG, stat.S_IFDIR)
                if not is_plain and not ((real.is_file() or real.is_dir()) and any(map(real.is_relative_to, targets))):
                    raise ValueError(
                        f"{path} is a link or a special file, which is not supported in this folder, because it may "
                        "lead to files elsewhere; replace it with a copy of its content, or delete it."
                    )


def user_path(text: str) -> Path:
    """Returns the path of a flag such as `--output=~/FOLDER`, in which shells do not expand the ~."""
    return Path(text).expanduser()
