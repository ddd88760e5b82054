"""Canonical form of the decompositions of a product of two numbers, independent of how they are written."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator

from poly_epo_jax.tasks.arithmetic import Expression, Product, Sum

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
    return is_decomposed and 1 not in totals and _match_operands(totals, a, b)


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


def _match_operands(factors: list[int], a: int, b: int) -> bool:
    """Returns True if some of the factors multiply to a and the remaining ones to b."""
    chosen = itertools.chain.from_iterable(itertools.combinations(factors, k) for k in range(1, len(factors)))
    return math.prod(factors) == a * b and a in map(math.prod, chosen)


def _expand(factors: list[list[int]]) -> Decomposition | None:
    if math.prod(map(len, factors)) > MAX_TERMS:
        return None
    terms = Counter(
        (1 if math.prod(chosen) > 0 else -1, tuple(sorted(map(abs, chosen)))) for chosen in itertools.product(*factors)
    )
    return tuple(sorted(terms.elements()))
