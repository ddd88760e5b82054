"""Reserves a folder for one process at a time: a lock on a file in it or next to it, which ends with its holder."""

import contextlib
import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class InUseError(OSError):
    """Another process holds the lock; the message says which, and what to do."""


@contextlib.contextmanager
def exclusive(path: Path, what: str, wait: bool = False) -> Iterator[None]:
    """Holds a lock on the file `path`, which is created if missing and stays.

    It is a kernel lock (flock), so it ends with the process, even after kill -9. On NFS it holds between hosts. On a
    disk without locks, this says so on stderr, and nothing keeps others out.

    Args:
      what: what is locked, for messages: "the run folder runs/default".
      wait: wait for the other process to end, instead of giving up.

    Raises:
      InUseError: another process holds the lock.
      OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:  # not read-only: NFS requires this
        holder = path.read_text(errors="replace").strip() or "another process"
        try:
            _lock(file.fileno(), wait, f"{what} is in use by {holder}")
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"Warning: {path} is on a disk without locks; nothing keeps others out of {what}.", file=sys.stderr)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _lock(descriptor: int, wait: bool, in_use: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise InUseError(f"{in_use}; wait for it to end, end it, or choose another folder.") from None
        print(f"{in_use}; waiting for it to end.", file=sys.stderr)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
