"""Formats external texts for messages: errors of other libraries, unknown names and unprintable characters."""

import difflib
import re
from collections.abc import Iterable


def first_line(error: BaseException) -> str:
    """Returns the first line of an error message, or the name of the error's type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


SURROGATE = re.compile("[\ud800-\udfff]")
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown name: the closest known name, and all known names.

    Args:
      name: The unknown name.
      known: All known names.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, 1)
    listed = ", ".join(names) or "none"
    return f"; did you mean {near[0]}? It takes {listed}." if near else f"; it takes {listed}."


def printable(text: str) -> str:
    """Replaces control characters and lone surrogates with the Unicode replacement character."""
    return UNPRINTABLE.sub("\ufffd", text)
