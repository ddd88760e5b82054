"""Texts from elsewhere as part of a sentence: errors of other libraries, unknown names, unprintable characters."""

import difflib
import re
from collections.abc import Iterable


def first_line(error: BaseException) -> str:
    """The first line of the error's text, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the name that may be meant, and all known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, 1)
    listed = ", ".join(names) or "none"
    return f"; did you mean {near[0]}? It takes {listed}." if near else f"; it takes {listed}."


def printable(text: str) -> str:
    """`text` with a replacement character in place of control characters and lone surrogates."""
    return UNPRINTABLE.sub("\ufffd", text)
