"""The generations of a prompt as a tree of shared prefixes, and how early it spreads.

Two generations that agree through token h - 1 and differ at token h branch at h (paper §6.1, branching in generations).
Positions h count tokens from 1; the prompt is the root, at h = 0.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int


def active_branches(
    token_ids: Sequence[Int[np.ndarray, " _"]], max_position: int | None = None
) -> Int[np.ndarray, " positions"]:
    """Branches at each position h: distinct prefixes of length h among the generations of at least h tokens.

    Entry h - 1 is position h. A generation that has ended is on no branch, so the count may fall.

    In lexicographic order, generations of the same prefix are neighbours, and none that has ended lies between them.
    So each generation opens a branch one token after the prefix that it shares with the one before it, and closes it
    at its end: one sort and one comparison for each generation.

    Args:
      token_ids: the generations of one prompt, without padding.
      max_position: the last position counted; the longest generation's end if None.

    Raises:
      ValueError: for a negative max_position.
    """
    if max_position is None:
        max_position = max(map(len, token_ids), default=0)
    if max_position < 0:
        raise ValueError(f"max_position is {max_position}, but must not be negative.")
    # Any order that keeps equal prefixes together will do, so bytes are compared, which is fastest.
    ordered = sorted((ids[:max_position].astype(np.int64) for ids in token_ids), key=lambda ids: ids.tobytes())
    change = np.zeros(max_position + 1, dtype=np.int64)
    previous = np.zeros(0, dtype=np.int64)
    for ids in ordered:
        change[_shared_prefix(previous, ids)] += 1
        change[len(ids)] -= 1
        previous = ids
    return np.cumsum(change[:max_position])


def mean_active_branches(
    problems: Sequence[Sequence[Int[np.ndarray, " _"]]], max_position: int | None = None
) -> Float[np.ndarray, " positions"]:
    """Mean over problems of `active_branches`, at each position up to the longest generation of any problem.

    A problem whose generations have all ended counts as 0 branches there, so the curve falls where generations end.

    Raises:
      ValueError: for no problems, or a negative max_position.
    """
    if not problems:
        raise ValueError("The mean over problems needs at least one problem.")
    if max_position is None:
        max_position = max((len(ids) for token_ids in problems for ids in token_ids), default=0)
    total = np.zeros(max(max_position, 0), dtype=np.int64)
    for token_ids in problems:
        total += active_branches(token_ids, max_position)
    return total / len(problems)


@dataclasses.dataclass(frozen=True)
class Segment:
    """An edge of the rollout tree: a stretch of tokens that the same generations share.

    They are tokens `start + 1` to `end` of each, counted from 1: `token_ids[generation][start:end]`. `parent` is the
    index of the segment before it, None at the root; `generations` are indices.
    """

    start: int
    end: int
    parent: int | None
    generations: tuple[int, ...]


def prefix_tree(token_ids: Sequence[Int[np.ndarray, " _"]]) -> list[Segment]:
    """The rollout tree of one prompt for a figure (paper §6.1), parents before their children.

    A segment ends where its generations branch or one of them ends, so the tree has as many segments over position h
    as there are active branches. A generation of no tokens is in none.
    """
    segments: list[Segment] = []
    unfinished: list[tuple[int, int | None, Sequence[int]]] = [(0, None, range(len(token_ids)))]
    while unfinished:
        start, parent, generations = unfinished.pop()
        by_next_token: dict[int, list[int]] = {}
        for generation in generations:
            if len(token_ids[generation]) > start:
                by_next_token.setdefault(int(token_ids[generation][start]), []).append(generation)
        for members in by_next_token.values():
            first = token_ids[members[0]]
            end = min(_shared_prefix(first, token_ids[member]) for member in members)
            unfinished.append((end, len(segments), members))
            segments.append(Segment(start, end, parent, tuple(members)))
    return segments


def _shared_prefix(a: Int[np.ndarray, " _"], b: Int[np.ndarray, " _"]) -> int:
    """How many first tokens are equal."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
