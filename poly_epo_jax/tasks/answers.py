r"""Extracts answers from responses and from values of datasets, and normalizes LaTeX that math-verify would misread."""

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

CHARACTERS = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width ASCII
    | {
        "~": " ",
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{MULTIPLICATION SIGN}": r"\times ",
        "\N{MIDDLE DOT}": r"\cdot ",
        "\N{DOT OPERATOR}": r"\cdot ",
        "÷": r"\div ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "√": r"\sqrt ",
        "±": r"\pm ",
        "≈": r"\approx ",
        "∅": r"\emptyset ",
        "≤": r"\leq ",
        "≥": r"\geq ",
        "\N{UNION}": r"\cup ",
        "°": r"^\circ ",
    }
)
"""LaTeX commands or ASCII characters, by the Unicode symbol that is often typed in their place.

A space replaces `~`, the non-breaking space of LaTeX.
"""
REORDERING = ("RLE", "RLO", "RLI")
"""Bidirectional classes of the invisible characters that change the order of the visible ones."""

SPACE = r"(?:\s|\\[ ,;:!>])"
ESCAPE_OR_COMMAND = re.compile(r"(?<!\\)\\[bfnrt]")
"""A control character in JSON, or the beginning of a LaTeX command."""
MATH_MODE = re.compile(r"(?<!\\)\\[][()]")
# A font group of at least two letters is a word and becomes `\text`. Other font groups remain mathematics.
FONT = r"\\(?:boldsymbol|bm|pmb|math(?:bf|it|sf|tt|normal))\s*"
FONT_OF_WORD = re.compile(FONT + r"(?=\{[a-zA-Z\s]{2,}\})")
FONT_OF_FORMULA = re.compile(
    FONT + r"(?=\{)"
    r"|\\(?:bf|it|rm|sf|tt|displaystyle|textstyle|normalsize|[lL]arge|LARGE|[hH]uge|small)(?![a-zA-Z])"
    r"|\\(?:text)?color\s*\{[\w!]*\}",
    re.ASCII,
)
DEGREES = re.compile(r"\\degree(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}")
ARGUMENT = re.compile(r"(\\(?:[dtc]?frac|sqrt|binom))\s+(?=\d)", re.ASCII)
THOUSANDS = re.compile(rf"(?<![\w.,^\\])[1-9]\d{{0,2}}(?:(?:{SPACE}{{1,9}}|\{{,\}})\d{{3}})+(?!\d)", re.ASCII)
SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d+)(?!\w)", re.ASCII)
REPEATING = re.compile(r"(?<![\w.])(\d{1,99})\.(\d{0,99})\\overline\{(\d{1,99})\}", re.ASCII)
MIXED = re.compile(
    rf"(?<![\w.,^\\}}])(\d{{1,99}}){SPACE}{{0,9}}(?:\\[dtc]?frac\s{{0,9}}(?:(\d)\s{{0,9}}(\d)|"
    rf"\{{(\d{{1,99}})\}}\s{{0,9}}\{{(\d{{1,99}})\}})|(?<!\d)(\d{{1,99}})/(\d{{1,99}})(?![\d.]))",
    re.ASCII,
)
OPEN_DECIMAL = re.compile(r"(?<=\d)\.(?=/)")
PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")
EMPTY_SET = re.compile(r"\\varnothing(?![a-zA-Z])")
DOTTED = re.compile(r"(?<=[\d.])\\dot\s*(?:(\d)|\{(\d)\})(?:(\d{0,99})\\dot\s*(?:(\d)|\{(\d)\}))?", re.ASCII)
# math-verify only recognizes the imaginary unit between word boundaries.
IMAGINARY = re.compile(r"\\(?:text|math)(?:rm|it|normal)?\s*\{\s*i\s*\}|(?<=\d)i(?![a-zA-Z])")
IN_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)\s{0,9}(?:\^\s{0,9}\{?\d\}?\s{0,9})?(?:\\left\s{0,9})?[({]?\s{0,9})"
    r"(\d{1,99}(?:\.\d{1,99})?)\s{0,9}\^\s{0,9}\\circ(?![a-zA-Z])",
    re.ASCII,
)


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
      value: Text or a finite number. A list of one value, or a dict with the key `ground_truth`, is replaced by this
        value. The same applies to JSON text of a dict or of a list of strings. Other text in brackets, such as `[3]`,
        is an answer.
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


def normalize_latex(answer: str) -> str:
    r"""Normalizes a LaTeX answer so that math-verify parses it as intended.

    Replaces Unicode symbols. Removes fonts, sizes, colors, `\[`, trailing periods, commas and semicolons, and the
    period in `3./2`, and a leading equals sign. Rewrites thousands separators (`1\,296` becomes one number), mixed
    numbers (`33\frac13` becomes 100/3), scientific notation (`4.5e33` becomes a multiple of a power of ten instead of
    Euler's number), repeating decimals (`8.\overline{3}` becomes 25/3), the imaginary unit, angles in degrees
    (`\sin 30^\circ`), and plus-minus signs (`\frac{1 \pm 5}{2}` becomes two numbers).
    """
    answer = MATH_MODE.sub(" ", visible(answer).translate(CHARACTERS)).strip().removeprefix("=").lstrip()
    answer = EMPTY_SET.sub(r"\\emptyset", IMAGINARY.sub(" i ", answer)).strip()
    answer = FONT_OF_FORMULA.sub("", FONT_OF_WORD.sub(r"\\text", answer)).strip()
    answer = DEGREES.sub(r"^\\circ ", answer)
    answer = IN_DEGREES.sub(r"\1\\frac{\2 \\pi}{180}", answer)
    answer = ARGUMENT.sub(r"\1", answer)
    answer = THOUSANDS.sub(lambda match: re.sub(rf"{SPACE}|[{{,}}]", "", match[0]), answer)
    answer = MIXED.sub(_mixed_number, answer)
    answer = SCIENTIFIC.sub(lambda match: rf"{match[1]} \times 10^{{{match[2].lstrip('+')}}}", answer)
    answer = DOTTED.sub(lambda match: rf"\overline{{{''.join(digits or '' for digits in match.groups())}}}", answer)
    answer = REPEATING.sub(_repeating_decimal, answer)
    answer = OPEN_DECIMAL.sub("", answer)
    if not answer.endswith((r"\right.", r"\,", r"\;", "..")):
        answer = answer.rstrip(".,; \n\t")
    if PLUS_MINUS.search(answer) and "," not in answer:
        answer = ", ".join(PLUS_MINUS.sub(sign, answer) for sign in "+-")
    return answer


def _mixed_number(match: re.Match[str]) -> str:
    whole, numerator, denominator = (int(digits) for digits in match.groups() if digits)
    if numerator >= denominator:
        return rf"{whole} \cdot \frac{{{numerator}}}{{{denominator}}}"
    return rf"\frac{{{whole * denominator + numerator}}}{{{denominator}}}"


def _repeating_decimal(match: re.Match[str]) -> str:
    whole, fixed, period = match.groups()
    numerator = int(whole + fixed + period) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(period) - 1)}}}"
