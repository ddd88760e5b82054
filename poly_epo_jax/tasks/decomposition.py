"""How an expression takes a product of two numbers apart, in whatever form it is written."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator

from poly_epo_jax.tasks.arithmetic import Expression, Product, Sum

MAX_FACTORS, MAX_TERMS = 8, 64

Decomposition = tuple[tuple[int, tuple[int, ...]], ...]
"""The terms of a product, multiplied out and sorted: each is a sign and its factors, the smallest first.

(340+3)*(70-3) and 340*70-340*3+3*70-3*3 have the same decomposition.
"""


def decomposition(expression: Expression, a: int, b: int) -> Decomposition | None:
    """How `expression` takes a * b apart: into factors, some of which may be sums, or into the products of their parts.

    None if it does not: it is a * b itself, a factor is 1, a part is 0, or its factors are not those of a together with
    those of b, so that it takes the result apart rather than the operands.
    """
    if isinstance(expression, Product):
        candidates = iter([[_parts(factor) for factor in expression.factors]])
    else:
        candidates = _grids(expression)
    return next((_multiplied_out(factors) for factors in candidates if _takes_apart(factors, a, b)), None)


def _takes_apart(factors: list[list[int]], a: int, b: int) -> bool:
    if not 2 <= len(factors) <= MAX_FACTORS or any(not parts or 0 in parts for parts in factors):
        return False
    totals = [sum(parts) for parts in factors]
    is_apart = len(factors) > 2 or any(len(parts) > 1 for parts in factors)
    return is_apart and 1 not in totals and _are_those_of_both(totals, a, b)


def _parts(factor: Expression) -> list[int]:
    """The number itself, or the signed numbers of a sum; nothing for any other expression."""
    if isinstance(factor, int):
        return [factor]
    if isinstance(factor, Sum) and all(isinstance(term, int) for _, term in factor.terms):
        return [sign * term for sign, term in factor.terms if isinstance(term, int)]
    return []


def _grids(expression: Expression) -> Iterator[list[list[int]]]:
    """Every pair of sums whose product, multiplied out row by row, reads as this sum of products."""
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
    """The rows' sum and the columns' sum, if there are any; `first`: which factor of the first term is the rows'."""
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
    """The factor next to `number`; 0, which is never a part, if neither of the two is `number`."""
    return pair[1 - pair.index(number)] if number in pair else 0


def _are_those_of_both(factors: list[int], a: int, b: int) -> bool:
    """Whether some of the factors multiply to a and the others to b."""
    chosen = itertools.chain.from_iterable(itertools.combinations(factors, k) for k in range(1, len(factors)))
    return math.prod(factors) == a * b and a in map(math.prod, chosen)


def _multiplied_out(factors: list[list[int]]) -> Decomposition | None:
    if math.prod(map(len, factors)) > MAX_TERMS:
        return None
    terms = Counter(
        (1 if math.prod(chosen) > 0 else -1, tuple(sorted(map(abs, chosen)))) for chosen in itertools.product(*factors)
    )
    return tuple(sorted(terms.elements()))
