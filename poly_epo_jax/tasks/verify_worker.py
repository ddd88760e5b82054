r"""Compares mathematical answers with math-verify. `worker.py` runs this script, so it does not import this package."""

import dataclasses
import functools
import itertools
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import (
    And,
    Derivative,
    Eq,
    Expr,
    FiniteSet,
    Float,
    I,
    Intersection,
    Interval,
    MatrixBase,
    Rational,
    S,
    Symbol,
    Tuple,
    Union,
    nan,
    zoo,
)
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.functions.elementary.trigonometric import TrigonometricFunction

# Units are removed by `answer_rules`: math-verify would remove variables and any text after a number.
LATEX = LatexExtractionConfig()
LATEX = dataclasses.replace(LATEX, normalization_config=dataclasses.replace(LATEX.normalization_config, units=False))
PERCENT = re.compile(r"\\%")
OR, AND = (
    re.compile(rf",?\s*(?:(?<![a-zA-Z\\])(?:{word})(?![a-zA-Z])|\\(?:{signs})(?![a-zA-Z]))")
    for word, signs in (("or", "lor|vee"), ("and", "land|wedge"))
)
NAMES = (Symbol, AppliedUndef, TrigonometricFunction, Derivative)
"""Types of the left sides of equations that name a value instead of determining a variable."""
RATIO = re.compile(r"[^:]{1,99}(?::[^:]{1,99}){2,9}")


def readings(text: str) -> list[Any]:
    """Returns the possible interpretations of an answer. Percentages are divided by 100."""
    text = PERCENT.sub(r" \\cdot \\frac{1}{100}", text)
    if RATIO.fullmatch(text):
        first, *others = (parsed(part)[0] for part in text.split(":"))
        return [Tuple(Symbol("ratio"), *(other / first for other in others))]
    combined = [_combined(text, word, combine) for word, combine in ((AND, Intersection), (OR, Union))]
    return combined[0] or [*parsed(text), *combined[1]]


def _combined(text: str, word: re.Pattern[str], combine: Callable[..., Any]) -> list[Any]:
    """Returns the set that inequalities describe, whose separator math-verify would read as a comma."""
    parts = word.split(text)
    relations = [parsed(part)[0] for part in parts] if len(parts) > 1 else []
    inequalities = [one for one in relations if isinstance(one, Relational | And) and not any(sides(one))]
    return [combine(*(one.as_set() for one in inequalities))] if 1 < len(inequalities) == len(parts) else []


@functools.lru_cache(maxsize=256)
def parsed(text: str) -> list[Any]:
    """Returns the answer as a SymPy expression, if it can be parsed, and as a string."""
    # The entire box must be parsed. Otherwise math-verify would search it for any part that it can parse.
    expressions = parse(
        f"\\boxed{{{text}}}",
        [LATEX],
        extraction_mode="first_match",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]  (None is documented)
        raise_on_error=True,
    )
    return [_with_imaginary_unit(one) for one in expressions]


def _with_imaginary_unit(reading: Any) -> Any:
    symbols = getattr(reading, "free_symbols", set())
    if not any(symbol.name == "i" for symbol in symbols):
        return reading
    return reading.xreplace({one: I if one.name == "i" else Symbol(one.name) for one in symbols})


@functools.lru_cache(maxsize=256)
def value(reading: Expr) -> Any:
    """Returns the value of an expression whose variables have fixed values, or None if it is not known to 9 digits."""
    point = {one: Rational(zlib.crc32(str(one).encode()) % 9973 + 1, 4999) for one in reading.free_symbols}
    try:
        result = reading.evalf(15, subs=point)
    except MemoryError:
        raise
    except Exception:
        return None
    known = result.is_number and result.is_finite and all(part._prec > 30 for part in result.atoms(Float))
    return result if known else None


def differ(gold: Any, answer: Any) -> bool:
    """Returns True if two expressions differ by more than a relative 1e-10 at a point, or two rational numbers at all.

    This takes less time than a failed proof of equality.
    """
    if not all(isinstance(side, Expr) and not isinstance(side, Symbol | MatrixBase) for side in (gold, answer)):
        return False
    first, second = value(gold), value(answer)
    if first is not None and second is not None and abs((first - second).evalf()) > 1e-10 * abs(first.evalf()):
        return True
    exact = [side.doit() if side.is_number else side for side in (gold, answer)]
    return all(isinstance(side, Rational) for side in exact) and exact[0] != exact[1]


def sides(reading: Any) -> Iterator[Any]:
    """Yields the expressions that a chain of equations equates."""
    if isinstance(reading, And):
        for link in reading.args:
            yield from sides(link)
    elif isinstance(reading, Eq):
        yield from reading.args


def is_contradiction(gold: Any, answer: Any) -> bool:
    """Returns True if an answer equates different numbers, such as 26 = 27."""
    numbers = [side for side in sides(answer) if isinstance(side, Expr) and not side.atoms(Symbol, AppliedUndef)]
    return any(not equal(numbers[0], other) for other in numbers[1:])


def is_condition(gold: Any, answer: Any) -> bool:
    """Returns True if an answer such as x^2 = 4 determines a variable, and its right side is not a value of it."""
    named: Any = answer.lhs if isinstance(answer, Eq) and not isinstance(gold, Eq | And) else None
    return isinstance(named, Expr) and len(named.free_symbols) == 1 and not isinstance(named, NAMES)


def is_exchanged(gold: Any, answer: Any) -> bool:
    """Returns True if an answer lists the values of named variables in another order than the gold answer."""
    if not (
        isinstance(gold, FiniteSet) and isinstance(answer, FiniteSet) and all(isinstance(x, Eq) for x in gold.args)
    ):
        return False
    if any(isinstance(one, Eq) for one in answer.args) or len({one.lhs for one in gold.args}) < len(gold.args):
        return False
    ordered = zip(*(getattr(side, "_unsorted_args", side.args) for side in (gold, answer)), strict=False)
    return not all(equal(one.rhs, other) for one, other in ordered)


def is_another_function(gold: Any, answer: Any) -> bool:
    """Returns True if both answers state the value of a function, such as f(2) = 3, but not of the same one."""
    names = [one.lhs.func for one in (gold, answer) if isinstance(one, Eq) and isinstance(one.lhs, AppliedUndef)]
    return len(names) > 1 and names[0] != names[1]


VETOES: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "another value": ("math-verify compares with an absolute tolerance, and slowly.", differ),
    "false equation": ("math-verify only reads the last side of a chain of equations.", is_contradiction),
    "condition": ("math-verify reads the right side of any equation as its value.", is_condition),
    "another function": ("math-verify reads f(2) = 3 as 3.", is_another_function),
    "exchanged names": ("math-verify sorts the values of a set.", is_exchanged),
}
"""Reason and function `(gold, answer) -> rejected` of each rule that rejects an answer which math-verify may accept."""


def unwrapped(reading: Any) -> Any:
    """Returns the element of a set with one element, and any other reading unchanged."""
    is_single = isinstance(reading, FiniteSet) and len(reading.args) == 1
    return reading.args[0] if is_single and not isinstance(reading.args[0], FiniteSet | type(S.EmptySet)) else reading


def equal(gold: Any, answer: Any) -> bool:
    """Returns True if two readings are equal. Returns False if they are not, or if SymPy cannot compare them."""
    gold, answer = unwrapped(gold), unwrapped(answer)
    if any(rejects(gold, answer) for _, rejects in VETOES.values()):
        return False
    if gold == answer and gold not in (nan, zoo):
        return True
    if isinstance(gold, Eq) and isinstance(answer, Eq) and gold.lhs == answer.lhs:
        return equal(gold.rhs, answer.rhs)
    if isinstance(answer, Eq) and not isinstance(gold, Relational | And):
        return equal(gold, answer.rhs)
    if isinstance(gold, Eq) and isinstance(gold.lhs, NAMES) and not isinstance(answer, Relational | And):
        return equal(gold.rhs, answer)
    if isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase):
        return gold.shape == answer.shape and all(map(equal, gold.flat(), answer.flat()))
    if isinstance(gold, Interval) and isinstance(answer, Interval):
        return gold.args[2:] == answer.args[2:] and all(map(equal, gold.args[:2], answer.args[:2]))
    if isinstance(gold, Tuple) and isinstance(answer, Tuple):
        return len(gold) == len(answer) and all(map(equal, gold, answer))
    for kind in (FiniteSet, Union):
        if isinstance(gold, kind) and isinstance(answer, kind) and len(gold.args) == len(answer.args):
            table = [[equal(one, other) for other in answer.args] for one in gold.args]
            return all(map(any, table)) and all(map(any, zip(*table, strict=True)))
    return verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)


def may_be_equal(gold: Any, answer: Any) -> bool:
    """Returns `equal`, or False if SymPy cannot compare the readings."""
    try:
        return equal(gold, answer)
    except MemoryError:
        raise
    except Exception:
        return False


def same(gold: str, answer: str) -> bool:
    """Returns True if any reading of the answer equals any reading of the gold answer.

    An answer may omit the percent sign of the gold answer, but must not add one.
    """
    meant = readings(gold)
    if PERCENT.search(gold) and not PERCENT.search(answer):
        meant = meant + readings(PERCENT.sub("", gold))
    return any(may_be_equal(*pair) for pair in itertools.product(meant, readings(answer)))


def read(text: str) -> bool:
    """Parses and evaluates an answer, as every comparison with it does, and returns True."""
    for reading in readings(text):
        differ(reading, reading)
    return True


def open_grader() -> Callable[..., str]:
    """Returns a function that receives one answer to read, or a gold answer and an answer to compare.

    The function returns "right" (read in time, or equal) or "wrong".
    """
    same("1", "1")  # imports and initializes the parser
    return lambda *texts: "right" if (read(*texts) if len(texts) == 1 else same(*texts)) else "wrong"
