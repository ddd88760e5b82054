r"""Finds the final answer in a response, and mends LaTeX that math-verify would misread."""

import re

BOX = re.compile(r"\\boxed\s*\{")
# An escaped character, or a brace; `\\` goes first so that the brace of `\\{` counts.
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)

CHARACTERS = str.maketrans(
    {
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
        "≤": r"\leq ",
        "≥": r"\geq ",
        "\N{UNION}": r"\cup ",
        "°": r"^\circ ",
    }
)
"""Characters that people type in place of LaTeX commands, and those commands."""

SPACE = r"(?:\s|\\[ ,;:!>])"
MATH_MODE = re.compile(r"(?<!\\)\\[][()]")
# If such a group has only letters, it is a word, which is text; anything else stays mathematics.
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


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` in `text`; None if there is none, or if it is never closed."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    start, depth = boxes[-1].end(), 1
    for match in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : match.start()].strip()
    return None


def mend(answer: str) -> str:
    r"""The same answer in notation that math-verify reads as it was meant.

    Fonts, sizes, colours and `\[` are not part of an answer, nor are full stops and commas at its end, nor the full
    stop in `3./2`. `1\,296` is one number, `33\frac13` is 100/3, `4.5e33` means a power of ten and not a multiple of
    Euler's number, `8.\overline{3}` is 25/3, and `\frac{1 \pm 5}{2}` is two numbers.
    """
    answer = MATH_MODE.sub(" ", answer.translate(CHARACTERS)).strip()
    answer = FONT_OF_FORMULA.sub("", FONT_OF_WORD.sub(r"\\text", answer)).strip()
    answer = DEGREES.sub(r"^\\circ ", answer)
    answer = ARGUMENT.sub(r"\1", answer)
    answer = THOUSANDS.sub(lambda match: re.sub(rf"{SPACE}|[{{,}}]", "", match[0]), answer)
    answer = MIXED.sub(_mixed_number, answer)
    answer = SCIENTIFIC.sub(lambda match: rf"{match[1]} \times 10^{{{match[2].lstrip('+')}}}", answer)
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
