"""A folder that only its user can enter, although it is in a place where everyone may write, such as /dev/shm.

Its name is derived from the user and the run, so that a run that was killed finds and frees what it left there. Someone
else could guess the name: anything at that path that is not this user's own folder is neither followed nor removed.
"""

import hashlib
import os
import shutil
import stat
from pathlib import Path


def private_folder(parent: Path, run: str) -> Path:
    """The path of a run's folder, which differs for every user; whatever the run left in it is removed.

    Raises:
      OSError: the folder cannot be made private to this user.
    """
    parent = parent.absolute()
    folder = parent / f"poly_epo_jax-{hashlib.sha256(f'{os.geteuid()} {run}'.encode()).hexdigest()[:16]}"
    if parent.exists() and _others_may_replace(parent.stat()):
        raise PermissionError(
            f"Everyone may replace folders in {parent}; chmod +t {parent}, or set rollouts.weights_dir to another."
        )
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return folder
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or _others_may_write(found):
        raise _planted(folder)
    shutil.rmtree(folder)
    return folder


def make_private(folder: Path) -> None:
    """Creates the folder and its parents.

    Raises:
      OSError: the folder already exists, or cannot be created.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        if os.path.lexists(folder):
            raise _planted(folder) from None
        raise OSError(
            f"The folder {folder} for weights cannot be made ({error.strerror}); set rollouts.weights_dir to another."
        ) from error


def _others_may_write(found: os.stat_result) -> bool:
    return bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _others_may_replace(found: os.stat_result) -> bool:
    return bool(found.st_mode & stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX


def _planted(folder: Path) -> PermissionError:
    return PermissionError(
        f"{folder} was made by someone else, and weights are not written there; have it removed, or set "
        "rollouts.weights_dir to another folder."
    )
