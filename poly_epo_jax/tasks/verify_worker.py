r"""Compares mathematical answers with math-verify. `worker.py` runs this script, so it does not import this package."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import And, Eq, Expr, FiniteSet, Interval, MatrixBase, Rational, Tuple

PERCENT = re.compile(r"\\text\s*\{\s*(?:percent|pct)\s*\}|(?<![a-zA-Z])(?:percent|pct)(?![a-zA-Z])|\\?%")
DECIMAL = re.compile(r"(?<![\d.])(\d{1,3}(?:,\d{3})+|\d*)\.(\d+)(?!\d|\.\.|\\l?dots)", re.ASCII)
BASE = re.compile(r"(?<=\d)\s*_\s*(\w|\{[^{}]*(?:\{[^{}]*\}[^{}]*)?\})", re.ASCII)
SPACE = r"(?:\s|\\[ ,;:!>]|\\q?quad)"
# Without a multiplication sign, SymPy would parse adjacent numbers as a mixed number: 2(3) as 5.
FACTORS = re.compile(r"((?<![\w^_.\\}])\d+|\))\s*(?=\(|\\left\s*\()|\)\s*(?=\d)", re.ASCII)
NUMBER_AS_TEXT = re.compile(r"\\(?:text|mbox)\s*\{\s*(-?\d[\d.,]*)\s*\}", re.ASCII)
UNCLEAR = re.compile(
    rf"(?<![\w\\^_.}}])\d+(?:\.\d+)?{SPACE}+[\d.]"  # two adjacent numbers
    r"|(?<![\w^_}])\d+\s*\{|(?:^|[^}\]\w\s^_])\s*\{\d+\}\s*[\d{]|\\phantom"  # numbers in braces, or invisible content
    r"|\\(?:text|mbox)\s*\{(?:[^{}]*[^{}\w^/])?\d|\u2030",  # text that contains a number and is not a unit; per mille
    re.ASCII,
)


def readings(text: str) -> list[Any]:
    """Returns the possible interpretations of an answer.

    Decimals are converted to exact fractions, and percentages are divided by 100. Number bases are removed, because
    `same` compares them separately. Ambiguous text is only interpreted as a string.
    """
    text = NUMBER_AS_TEXT.sub(r"\1", text)
    if UNCLEAR.search(text):
        return [text]
    text = PERCENT.sub(r" \\cdot \\frac{1}{100}", BASE.sub("", text))
    return parsed(FACTORS.sub(r"\g<0> \\cdot ", DECIMAL.sub(_fraction, text)))


def _fraction(match: re.Match[str]) -> str:
    whole, digits = match.groups()
    fraction = rf"\frac{{{whole.replace(',', '')}{digits}}}{{1{'0' * len(digits)}}}"
    return f"{{{fraction}}}" if match.string[: match.start()].endswith(("^", "_")) else fraction


def bases(text: str) -> list[str]:
    """Returns the number bases in an answer, except base 10, which is the default."""
    named = (re.sub(r"[^\w]", "", match[1].replace(r"\text", "")) for match in BASE.finditer(text))
    return [base for base in named if base != "10"]


@functools.lru_cache(maxsize=64)
def parsed(text: str) -> list[Any]:
    """Returns the answer as a SymPy expression, if it can be parsed, and as a string."""
    # The entire box must be parsed. Otherwise math-verify would search it for any part that it can parse.
    return parse(
        f"\\boxed{{{text}}}",
        [LatexExtractionConfig()],
        extraction_mode="first_match",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]  (None is documented)
        raise_on_error=True,
    )


def agree_exactly(gold: Any, answer: Any) -> bool:
    """Returns False if two numbers differ by more than a relative 1e-10.

    The tolerance of math-verify is an absolute 1e-15, so that 1e-19 would equal 1e-30. Rational numbers must be
    identical. Elements of matrices, tuples, sets and intervals are compared individually. All other pairs return True.
    """
    gold, answer = (side.rhs if isinstance(side, Eq) else side for side in (gold, answer))
    if isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase):
        return all(map(agree_exactly, gold.flat(), answer.flat()))
    if isinstance(gold, Tuple | FiniteSet | Interval) and type(gold) is type(answer):
        return all(map(agree_exactly, gold.args, answer.args))
    if not all(isinstance(side, Expr) and side.is_number for side in (gold, answer)):
        return True
    gold, answer = gold.doit(), answer.doit()
    if isinstance(gold, Rational) and isinstance(answer, Rational):
        return gold == answer
    return bool(abs((gold - answer).evalf()) <= 1e-10 * abs(gold.evalf()))


def sides(reading: Any) -> Iterator[Any]:
    """Yields the expressions that a chain of equations equates."""
    if isinstance(reading, And):
        for link in reading.args:
            yield from sides(link)
    elif isinstance(reading, Eq):
        yield from reading.args


def is_contradiction(reading: Any) -> bool:
    """Returns True if a reading equates different numbers, such as 26 = 27. Such an answer is always incorrect."""
    numbers = [side for side in sides(reading) if isinstance(side, Expr) and not side.free_symbols]
    return any(not equal(numbers[0], other) for other in numbers[1:])


def unwrapped(reading: Any) -> Any:
    """Returns the element of a set with one element, and any other reading unchanged."""
    return reading.args[0] if isinstance(reading, FiniteSet) and len(reading.args) == 1 else reading


def equal(gold: Any, answer: Any) -> bool:
    """Returns True if two readings are equal. Returns False if they are not, or if SymPy cannot compare them."""
    gold, answer = unwrapped(gold), unwrapped(answer)
    try:
        same = verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
        return same and agree_exactly(gold, answer) and not is_contradiction(answer)
    except MemoryError:
        raise
    except Exception:
        return False


def same(gold: str, answer: str) -> bool:
    """Returns True if any reading of the answer equals any reading of the gold answer.

    An answer may omit the base and the percent sign of the gold answer, but must not add a base or percent sign.
    """
    if bases(answer) not in ([], bases(gold)):
        return False
    meant = readings(gold)
    if PERCENT.search(gold) and not PERCENT.search(answer):
        meant = meant + readings(PERCENT.sub("", gold))
    return any(equal(*pair) for pair in itertools.product(meant, readings(answer)))


def open_grader() -> Callable[[str, str], str]:
    """Returns a function `(gold, answer) -> "right" or "wrong"`."""
    same("1", "1")  # imports and initializes the parser
    return lambda gold, answer: "right" if same(gold, answer) else "wrong"
