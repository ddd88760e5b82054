r"""The final answer within a response, and the mending of LaTeX that math-verify would misread."""

import re

BOX = re.compile(r"\\boxed\s*\{")
# An escaped character, or a brace; `\\` goes first so that the brace of `\\{` counts.
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d+)(?!\w)", re.ASCII)
REPEATING = re.compile(r"(?<![\w.])(\d{1,99})\.(\d{0,99})\\overline\{(\d{1,99})\}", re.ASCII)
OPEN_DECIMAL = re.compile(r"(?<=\d)\.(?=/)")
MATH_MODE = re.compile(r"(?<!\\)\\[][()]")
PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` of `text`; None without one, or if it is never closed."""
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

    `4.5e33` is a power of ten, not a multiple of Euler's number; `8.\overline{3}` is 25/3; `\frac{1 \pm 5}{2}` is two
    numbers; `~` is a space; `\[` and `\(` begin no part of the answer; full stops and commas at the end are none of
    the answer's, nor is the one in `3./2`.
    """
    answer = MATH_MODE.sub(" ", answer.replace("~", " ")).strip()
    answer = SCIENTIFIC.sub(lambda match: rf"{match[1]} \times 10^{{{match[2].lstrip('+')}}}", answer)
    answer = REPEATING.sub(_repeating_decimal, answer)
    answer = OPEN_DECIMAL.sub("", answer)
    if not answer.endswith((r"\right.", r"\,", r"\;", "..")):
        answer = answer.rstrip(".,; \n\t")
    if PLUS_MINUS.search(answer) and "," not in answer:
        answer = ", ".join(PLUS_MINUS.sub(sign, answer) for sign in "+-")
    return answer


def _repeating_decimal(match: re.Match[str]) -> str:
    whole, fixed, period = match.groups()
    numerator = int(whole + fixed + period) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(period) - 1)}}}"
