"""Warnings about repeated events. Only the 1st, 10th, 100th, ... event of a kind is printed."""

import re
import sys
from collections import Counter

_counts = Counter[str]()  # events of this process by kind


def warn_repeatedly(kind: str, text: str) -> None:
    """Counts an event, and prints a warning for the 1st, 10th, 100th, ... event of its kind.

    Args:
      kind: Kind of the event, which identifies its source.
      text: Text of the warning, without its number.
    """
    _counts[kind] += 1
    if re.fullmatch("10*", count := str(_counts[kind])):
        number = "" if count == "1" else f" This is number {count} of these warnings."
        print(f"Warning: {text}{number}", file=sys.stderr)
