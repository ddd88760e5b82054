"""File locks that reserve a folder for one process. The kernel releases a lock when its process ends."""

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
    """Raised when another process holds the lock. The message names the process and the remedy."""


@contextlib.contextmanager
def lock_file(path: Path, description: str, wait: bool = False, kind: str = "") -> Iterator[None]:
    """Holds an exclusive lock on a file.

    The kernel (flock) releases the lock when the process ends, including after SIGKILL. On NFS, the lock also excludes
    processes on other machines. If the file system does not support locks, a warning is printed and nothing is locked.

    Args:
      path: The lock file. It is created if it does not exist, and is not deleted.
      description: Description of the locked object for messages, such as "the run folder runs/default".
      wait: Whether to wait until another process releases the lock instead of raising InUseError.
      kind: Kind of the locked folder, which is written to the file, see output_folder.py.

    Raises:
      InUseError: If another process holds the lock and `wait` is False.
      OSError: If the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # NFS requires write access for an exclusive lock. A link could lead to another file, which would be overwritten.
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b", buffering=0) as file:
        holder = file.read(1000).decode(errors="replace").strip() or "another process"
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            in_use = f"{description} is in use by {holder}"
            if not wait:
                raise InUseError(f"{in_use}; wait until it ends, terminate it, or choose another folder.") from None
            print(f"{in_use}; waiting until it ends.", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(
                f"Warning: The file system of {path} does not support locks; other processes can also write to "
                f"{description}.",
                file=sys.stderr,
            )
        # The file is never empty after the first write, because its content identifies the folder.
        text = f"process {os.getpid()} on {socket.gethostname()}{f' ({kind})' if kind else ''}".encode()
        os.pwrite(file.fileno(), text, 0)
        file.truncate(len(text))
        yield
