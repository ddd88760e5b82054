"""Finds, parses and evaluates integer arithmetic in free text, which is never executed as code.

`decomposition` is a canonical form of the decompositions of a product of two numbers, independent of how they are
written.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
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
    depth = max(itertools.accumulate((token == "(") - (token == ")") for token in tokens), default=0)
    if "".join(tokens) != re.sub(" +", "", text) or re.search("[0-9] +[0-9]", text) or depth > MAX_DEPTH:
        return None
    try:
        expression, rest = _sum(tokens)
    except (IndexError, ValueError):
        return None
    return None if rest else expression


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


MAX_FACTORS, MAX_TERMS = 8, 64

Decomposition = tuple[tuple[int, tuple[int, ...]], ...]
"""The sorted terms of an expanded product. Each term is a sign and its factors in ascending order.

For example, (340+3)*(70-3) and 340*70-340*3+3*70-3*3 have the same decomposition.
"""


def decomposition(expression: Expression, a: int, b: int) -> Decomposition | None:
    """Returns the decomposition of a * b that `expression` represents.

    Args:
      expression: A product of factors, some of which may be sums, or the expanded sum of their products.
      a: First operand.
      b: Second operand.

    Returns:
      The canonical decomposition. None if `expression` does not decompose an operand: it is a * b itself, a factor is
      1, a summand is 0, or its factors cannot be divided into factors of a and factors of b, so that it decomposes the
      result instead of the operands. Also None if it has more than `MAX_FACTORS` factors, or more than `MAX_TERMS`
      terms when expanded.
    """
    if isinstance(expression, Product):
        candidates = iter([[_summands(factor) for factor in expression.factors]])
    else:
        candidates = _grids(expression)
    return next((_expand(factors) for factors in candidates if _is_decomposition(factors, a, b)), None)


def _is_decomposition(factors: list[list[int]], a: int, b: int) -> bool:
    if not 2 <= len(factors) <= MAX_FACTORS or any(not summands or 0 in summands for summands in factors):
        return False
    totals = [sum(summands) for summands in factors]
    is_decomposed = len(factors) > 2 or any(len(summands) > 1 for summands in factors)
    # Some of the factors multiply to a, and the remaining ones to b.
    chosen = itertools.chain.from_iterable(itertools.combinations(totals, k) for k in range(1, len(totals)))
    return is_decomposed and 1 not in totals and math.prod(totals) == a * b and a in map(math.prod, chosen)


def _summands(factor: Expression) -> list[int]:
    """Returns the number itself or the signed numbers of a sum, and an empty list for any other expression."""
    if isinstance(factor, int):
        return [factor]
    if isinstance(factor, Sum) and all(isinstance(term, int) for _, term in factor.terms):
        return [sign * term for sign, term in factor.terms if isinstance(term, int)]
    return []


def _grids(expression: Expression) -> Iterator[list[list[int]]]:
    """Yields every pair of sums whose product, expanded row by row, equals this sum of products term by term."""
    if not isinstance(expression, Sum) or len(expression.terms) > MAX_TERMS:
        return
    terms: list[tuple[int, tuple[int, int]]] = []
    for sign, term in expression.terms:
        match term:
            case Product((int(p), int(q))):
                terms.append((sign, (p, q)))
            case _:
                return
    for columns, first in itertools.product(range(len(terms), 0, -1), (0, 1)):
        if len(terms) % columns == 0 and (sums := _sums_of_grid(terms, columns, first)):
            yield sums


def _sums_of_grid(terms: list[tuple[int, tuple[int, int]]], columns: int, first: int) -> list[list[int]]:
    """Returns the summands of the row factor and of the column factor, or an empty list if the grid is inconsistent.

    The first term's factor at index `first` belongs to the rows, and its other factor to the columns.
    """
    row, column = terms[0][1][first], terms[0][1][1 - first]
    of_columns = [sign * _other(pair, row) for sign, pair in terms[:columns]]
    of_rows = [terms[0][0] * sign * _other(pair, column) for sign, pair in terms[::columns]]
    if not all(of_columns + of_rows):
        return []
    for (sign, pair), (r, c) in zip(terms, itertools.product(of_rows, of_columns), strict=True):
        if sign * pair[0] * pair[1] != r * c or sorted(pair) != sorted((abs(r), abs(c))):
            return []
    return [of_rows, of_columns]


def _other(pair: tuple[int, int], number: int) -> int:
    """Returns the other factor of a pair that contains `number`.

    If the pair does not contain it, returns 0, which is never a valid summand.
    """
    return pair[1 - pair.index(number)] if number in pair else 0


def _expand(factors: list[list[int]]) -> Decomposition | None:
    if math.prod(map(len, factors)) > MAX_TERMS:
        return None
    terms = Counter(
        (1 if math.prod(chosen) > 0 else -1, tuple(sorted(map(abs, chosen)))) for chosen in itertools.product(*factors)
    )
    return tuple(sorted(terms.elements()))
