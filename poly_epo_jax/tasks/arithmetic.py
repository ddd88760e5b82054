"""Finds, parses and evaluates integer arithmetic in free text. The text is never executed as code."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_CHARACTERS, MAX_DEPTH = 4000, 20
"""Number of characters that are read from the end of a text, and maximum nesting depth of parentheses.

Expressions with deeper nesting are not parsed.
"""

TIMES = str.maketrans({"\N{MULTIPLICATION SIGN}": "*", "\N{MIDDLE DOT}": "*", "\N{DOT OPERATOR}": "*"})
MINUS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-"})
LATEX_TIMES = re.compile(r"\\(?:times|cdot)(?![a-zA-Z])")
LATEX_AROUND = re.compile(r"\\(?:left|right|[][(),;!])|\$")
LETTER_TIMES = re.compile(r"(?<=[0-9)])[ ]*[xX][ ]*(?=[0-9(])")
THOUSANDS = re.compile(r"(?<![\w.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![\w,])")
FORMULA = re.compile(r"[0-9(-](?:[-+*=() 0-9]*[0-9)])?")
TOKEN = re.compile(r"[0-9]+|[-+*()]")


class Sum(NamedTuple):
    """A sum of terms, each paired with its sign (1 or -1)."""

    terms: "tuple[tuple[int, Expression], ...]"


class Product(NamedTuple):
    """A product of factors."""

    factors: "tuple[Expression, ...]"


Expression = int | Sum | Product


def equations(text: str) -> list[list[Expression]]:
    """Extracts all formulas from a text.

    Multiplication may be written as `*`, a cross, a dot, their LaTeX commands, or an x between numbers or parentheses.
    A parenthesis is also multiplied by a factor directly before it, as in `7(20+4)` or `(20+3)(70-3)`.

    Args:
      text: Free text. Only its last `MAX_CHARACTERS` characters are read.

    Returns:
      For each formula, in order of appearance, the expressions on the sides of its equals signs. A formula without `=`
      has one side. Sides that cannot be parsed are omitted, as are formulas without any other side.
    """
    text = text[-MAX_CHARACTERS:].translate(TIMES | MINUS)
    text = LETTER_TIMES.sub("*", LATEX_AROUND.sub(" ", LATEX_TIMES.sub("*", text)))
    text = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    formulas = [match[0] for line in text.splitlines() for match in FORMULA.finditer(line)]
    sides = [[parse_expression(side) for side in formula.split("=")] for formula in formulas]
    return [known for one in sides if (known := [side for side in one if side is not None])]


def value(expression: Expression) -> int:
    """Evaluates an expression."""
    match expression:
        case Sum(terms):
            return sum(sign * value(term) for sign, term in terms)
        case Product(factors):
            return math.prod(map(value, factors))
    return expression


def product(factors: Sequence[Expression]) -> Expression:
    """Multiplies factors symbolically. Nested products are flattened, and a single number or sum is returned as is."""
    flat = [one for factor in factors for one in (factor.factors if isinstance(factor, Product) else (factor,))]
    return flat[0] if len(flat) == 1 else Product(tuple(flat))


def parse_expression(text: str) -> Expression | None:
    """Parses the entire text as one expression, or returns None if it is not an expression."""
    tokens = TOKEN.findall(text)
    if "".join(tokens) != re.sub(" +", "", text) or re.search("[0-9] +[0-9]", text) or _depth(tokens) > MAX_DEPTH:
        return None
    try:
        expression, rest = _sum(tokens)
    except (IndexError, ValueError):
        return None
    return None if rest else expression


def _depth(tokens: Iterable[str]) -> int:
    """Returns the maximum nesting depth of the parentheses."""
    return max(itertools.accumulate((token == "(") - (token == ")") for token in tokens), default=0)


def _sum(tokens: list[str]) -> tuple[Expression, list[str]]:
    """Parses the longest sum at the start of the tokens, and returns it with the remaining tokens."""
    terms = []
    sign = 1
    if tokens[0] == "-":
        sign, tokens = -1, tokens[1:]
    while True:
        term, tokens = _product(tokens)
        terms.append((sign, term))
        if not tokens or tokens[0] not in "+-":
            break
        sign, tokens = (1 if tokens[0] == "+" else -1), tokens[1:]
    return (terms[0][1] if terms[0][0] == 1 and len(terms) == 1 else Sum(tuple(terms))), tokens


def _product(tokens: list[str]) -> tuple[Expression, list[str]]:
    factors: list[Expression] = []
    while True:
        factor, tokens = _factor(tokens)
        factors.append(factor)
        if tokens and tokens[0] == "*":
            tokens = tokens[1:]
        elif not tokens or tokens[0] != "(":
            return product(factors), tokens


def _factor(tokens: list[str]) -> tuple[Expression, list[str]]:
    if tokens[0] == "(":
        inside, tokens = _sum(tokens[1:])
        if tokens[0] != ")":
            raise ValueError("A parenthesis is not closed.")
        return inside, tokens[1:]
    return int(tokens[0]), tokens[1:]
