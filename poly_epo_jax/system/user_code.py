"""Reports exceptions of a user's code with a one-line error message, and writes the traceback to a file."""

import contextlib
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator

LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
"""Folders of the standard library and of installed packages."""

_tracebacks: dict[tuple[str, str], str] = {}  # files by type and line of the exception


class UserCodeError(ValueError):
    """Raised when a component of a user raises an exception. The message names the file of the traceback, if it exists.

    Args:
      reason: One sentence with the component, the problem, the line and the exception.
      traceback_file: File that contains the traceback, or an empty string.
    """

    def __init__(self, reason: str, traceback_file: str):
        super().__init__(reason + (traceback_file and f" A traceback is in {traceback_file}."))
        self.reason = reason


@contextlib.contextmanager
def user_code(component: object, method: str, problem: str | None = None) -> Iterator[None]:
    """Reports exceptions of calls of a user's component. Components and errors of this package are not affected.

    Args:
      component: Task or judge that is called.
      method: Name of the called method.
      problem: Id of the problem. If None, the call does not concern a problem.

    Raises:
      UserCodeError: If a component of a user raises an exception.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if not is_own(component) or is_ours(type(error).__module__):
            raise
        raise UserCodeError(
            f"{type(component).__name__}.{method} raised {type(error).__name__}"
            f"{'' if problem is None else f' for problem {problem!r}'}{user_line(error)}: {str(error).rstrip('.')}.",
            traceback_file(error),
        ) from error


def traceback_file(error: BaseException) -> str:
    """Writes the traceback of an exception to a file, unless there is one of the same type and line. Returns the file.

    A reward may raise the same exception for each response. Returns an empty string if the file cannot be written.
    """
    found = type(error).__name__, user_line(error)
    if found not in _tracebacks:
        try:
            with tempfile.NamedTemporaryFile(prefix="traceback-", suffix=".txt", delete=False) as file:
                file.write("".join(traceback.format_exception(error)).encode(errors="backslashreplace"))
        except OSError:  # The failure of the component must not end the run because the disk is full.
            return ""
        _tracebacks[found] = file.name
    return _tracebacks[found]


def is_own(component: object) -> bool:
    """Returns True if a user has defined the class of a component, or of one of its `parts`, which it calls."""
    return not is_ours(type(component).__module__) or any(map(is_own, getattr(component, "parts", ())))


def user_line(error: BaseException) -> str:
    """Returns " at FILE:LINE" for the innermost code in a traceback that is neither of this package nor of a library.

    If there is none, returns an empty string.
    """
    lines = [
        f" at {frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not is_ours(frame.f_globals.get("__name__", "")) and not frame.f_code.co_filename.startswith(LIBRARIES)
    ]
    return lines[-1] if lines else ""


def is_ours(module: str) -> bool:
    """Returns True if a module belongs to this package."""
    return module.partition(".")[0] == __name__.partition(".")[0]
