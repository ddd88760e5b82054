"""Extracts answers from responses and from values of datasets."""

import contextlib
import json
import math
import re
import unicodedata
from decimal import Decimal
from typing import Any

MAX_ANSWER_LENGTH = 2_000

BOX = re.compile(r"\\boxed\s*\{")
# Matches an escaped character or a brace. An escaped backslash is consumed first, so the brace in `\\{` counts.
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)

REORDERING = ("RLE", "RLO", "RLI")
"""Bidirectional classes of the invisible characters that change the order of the visible ones."""

ESCAPE_OR_COMMAND = re.compile(r"(?<!\\)\\[bfnrt]")
"""A control character in JSON, or the beginning of a LaTeX command."""


def visible(text: str) -> str:
    """Composes letters with their accents, writes all spaces as ASCII, and removes invisible characters.

    Invisible characters that reorder the visible ones are kept, because the answer is read in another order.
    """
    if text.isascii():
        return text
    kept = []
    for character in text:
        category = unicodedata.category(character)
        if category == "Zs":
            kept.append(" ")
        elif category != "Cf" or unicodedata.bidirectional(character) in REORDERING:
            kept.append(character)
    return unicodedata.normalize("NFC", "".join(kept))


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}` in `text`, or None if it is missing or not closed."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    start, depth = boxes[-1].end(), 1
    for match in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : match.start()].strip()
    return None


def reference_answer(value: Any, marker: str = "") -> tuple[str, str]:
    """Extracts the reference answer from the value of a dataset's answer column.

    Args:
      value: Text or a finite number. A floating-point number is rounded to 15 digits if this removes more than three,
        so that 0.30000000000000004 becomes 0.3. A list of one value, or a dict with the key `ground_truth`, is
        replaced by this value. The same applies to JSON text of a dict or of a list of strings. Other text in brackets,
        such as `[3]`, is an answer.
      marker: Text before the answer in a worked solution. The answer is the text after its last occurrence. If empty,
        the entire text is the answer.

    Returns:
      The answer and an empty string or, if the answer is unusable, an empty string and the reason, which is the name of
      a field of `problems.Dropped`.
    """
    if isinstance(value, str) and value.lstrip().startswith(('["', '{"')):
        value = _from_json(value)
    match value:
        case [single] | {"ground_truth": single}:
            return reference_answer(single, marker)
        case list() | dict() | bool():
            return "", "unusable_answer"
        case str() if marker:
            text = value.rpartition(marker)[2].strip() if marker in value else ""
        case None:
            text = ""
        case float() if value == value:
            # A calculation such as 0.1 + 0.2 has an error in the last of up to 17 digits.
            exact, rounded = repr(value), f"{value:.15g}"
            text = rounded if len(rounded) + 3 < len(exact) else exact
        case str() | int() | float() | Decimal():
            text = "" if value != value else str(value)
        case _:  # such as bytes, a date or a duration, whose representation in Python no response would contain
            return "", "unusable_answer"
    word = visible(text).strip().lower()
    if word in ("", "notfound", "nan", "null"):
        return "", "no_answer"
    if word == "proof":
        return "", "proofs"
    is_unusable = value in (math.inf, -math.inf) or len(text) > MAX_ANSWER_LENGTH
    return ("", "unusable_answer") if is_unusable else (text, "")


def _from_json(text: str) -> Any:
    r"""Parses JSON whose strings may contain LaTeX commands with one backslash. Returns any other text unchanged."""
    doubled = text.replace("\\", "\\\\")
    # Without doubling, JSON would read the beginning of \frac, \binom, \neq, \rho and \times as a control character.
    for candidate in (doubled,) if ESCAPE_OR_COMMAND.search(text) else (text, doubled):
        with contextlib.suppress(ValueError):
            return json.loads(candidate)
    return text
