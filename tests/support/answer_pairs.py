"""Reads the battery of answer pairs in tests/tasks/answer_pairs.txt, which were marked before any grader read them."""

import re
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parents[1] / "tasks" / "answer_pairs.txt"
CODE_POINT = re.compile(r"<U\+([0-9A-F]{4,5})>")
LINE = re.compile(r"(.+?) (==|!=) (.+)")


class Pair(NamedTuple):
    """A reference answer, an answer of the given kind, and whether they are mathematically equal."""

    kind: str
    gold: str
    answer: str
    is_equal: bool


def battery() -> list[Pair]:
    """Returns all pairs of the file.

    Raises:
      ValueError: If a line is neither a kind nor a pair.
    """
    kinds = FILE.read_text(encoding="utf-8").split("\n# ")[1:]
    pairs = []
    for kind, *lines in (section.split("\n") for section in kinds):
        for line in filter(None, lines):
            match = LINE.fullmatch(CODE_POINT.sub(lambda code: chr(int(code[1], 16)), line))
            if match is None:
                raise ValueError(f"{FILE.name} contains {line!r}, which is not a pair.")
            pairs.append(Pair(kind, match[1], match[3], match[2] == "=="))
    return pairs
