"""Whole-number arithmetic as people write it in prose: found in a text, parsed and evaluated, but never executed."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_CHARACTERS, MAX_DEPTH = 4000, 20
"""How much of a text is read, from its end; and how deep parentheses may nest: deeper nesting does not parse."""

TIMES = str.maketrans({"\N{MULTIPLICATION SIGN}": "*", "\N{MIDDLE DOT}": "*", "\N{DOT OPERATOR}": "*"})
MINUS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-"})
LATEX_TIMES = re.compile(r"\\(?:times|cdot)(?![a-zA-Z])")
LATEX_AROUND = re.compile(r"\\(?:left|right|[][(),;!])|\$")
LETTER_TIMES = re.compile(r"(?<=[0-9)])[ ]*[xX][ ]*(?=[0-9(])")
THOUSANDS = re.compile(r"(?<![\w.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![\w,])")
FORMULA = re.compile(r"[0-9(-](?:[-+*=() 0-9]*[0-9)])?")
TOKEN = re.compile(r"[0-9]+|[-+*()]")


class Sum(NamedTuple):
    """Terms that are added, each with its sign, 1 or -1."""

    terms: "tuple[tuple[int, Expression], ...]"


class Product(NamedTuple):
    factors: "tuple[Expression, ...]"


Expression = int | Sum | Product


def equations(text: str) -> list[list[Expression]]:
    """The sides of every formula in a text, in order; a formula without `=` has one side.

    Multiplication may be written as `*`, a cross, a dot, their LaTeX, or an x between numbers; `(20+3)(70-3)` is a
    product, too. Sides that do not parse are left out.
    """
    text = text[-MAX_CHARACTERS:].translate(TIMES | MINUS)
    text = LETTER_TIMES.sub("*", LATEX_AROUND.sub(" ", LATEX_TIMES.sub("*", text)))
    text = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    formulas = [match[0] for line in text.splitlines() for match in FORMULA.finditer(line)]
    sides = [[parsed(side) for side in formula.split("=")] for formula in formulas]
    return [known for one in sides if (known := [side for side in one if side is not None])]


def value(expression: Expression) -> int:
    match expression:
        case Sum(terms):
            return sum(sign * value(term) for sign, term in terms)
        case Product(factors):
            return math.prod(map(value, factors))
    return expression


def product(factors: Sequence[Expression]) -> Expression:
    """A single number or sum is returned as it is, and a product of products becomes one product."""
    flat = [one for factor in factors for one in (factor.factors if isinstance(factor, Product) else (factor,))]
    return flat[0] if len(flat) == 1 else Product(tuple(flat))


def parsed(text: str) -> Expression | None:
    """The expression that the whole text spells; None if it is not an expression."""
    tokens = TOKEN.findall(text)
    if "".join(tokens) != re.sub(" +", "", text) or re.search("[0-9] +[0-9]", text) or _depth(tokens) > MAX_DEPTH:
        return None
    try:
        expression, rest = _sum(tokens)
    except (IndexError, ValueError):
        return None
    return None if rest else expression


def _depth(tokens: Iterable[str]) -> int:
    """The largest number of parentheses that are open at once."""
    return max(itertools.accumulate((token == "(") - (token == ")") for token in tokens), default=0)


def _sum(tokens: list[str]) -> tuple[Expression, list[str]]:
    """The longest sum that the tokens begin with, and the tokens after it."""
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
