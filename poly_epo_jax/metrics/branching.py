"""Prefix tree of the generations of a prompt, and its number of branches at each token position.

Two generations whose first h - 1 tokens are equal and whose tokens h differ branch at h (paper §6.1, branching in
generations). Positions h start at 1; the prompt is the root, at h = 0.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int


def active_branches(token_ids: Sequence[Int[np.ndarray, " _"]]) -> Int[np.ndarray, " positions"]:
    """Counts the distinct prefixes of length h among the generations with at least h tokens, for each position h.

    Generations that have ended are not counted, so the count may decrease with h.

    In lexicographic order, generations with a common prefix are adjacent, without shorter generations between them.
    Each generation therefore opens a branch one token after the prefix that it shares with its predecessor, and closes
    the branch at its end. This takes one sort, and one comparison per generation.

    Args:
      token_ids: Token ids of the generations of one prompt, without padding.

    Returns:
      Number of branches up to the length of the longest generation, with position h at index h - 1.
    """
    # Any order that keeps equal prefixes adjacent suffices. Comparing bytes is fastest.
    ordered = sorted((ids.astype(np.int64) for ids in token_ids), key=lambda ids: ids.tobytes())
    change = np.zeros(1 + max(map(len, token_ids), default=0), dtype=np.int64)
    previous = np.zeros(0, dtype=np.int64)
    for ids in ordered:
        change[shared_prefix(previous, ids)] += 1
        change[len(ids)] -= 1
        previous = ids
    return np.cumsum(change[:-1])


def mean_active_branches(problems: Sequence[Sequence[Int[np.ndarray, " _"]]]) -> Float[np.ndarray, " positions"]:
    """Averages `active_branches` over problems.

    A problem counts as 0 branches at positions after the end of all its generations.

    Args:
      problems: Token ids of the generations of each problem.

    Returns:
      Mean number of branches up to the length of the longest generation of any problem, with position h at index h - 1.

    Raises:
      ValueError: If there are no problems.
    """
    if not problems:
        raise ValueError("problems must contain at least one problem.")
    counts = [active_branches(token_ids) for token_ids in problems]
    total = np.zeros(max(map(len, counts)), dtype=np.int64)
    for count in counts:
        total[: len(count)] += count
    return total / len(problems)


@dataclasses.dataclass(frozen=True)
class Segment:
    """An edge of the prefix tree: the tokens `token_ids[i][start:end]`, which are equal for all its generations i.

    Attributes:
      start: Number of tokens before the segment.
      end: Number of tokens up to the end of the segment.
      parent: Index of the preceding segment, or None at the root.
      generations: Indices of the generations that contain the segment, at least one.
    """

    start: int
    end: int
    parent: int | None
    generations: tuple[int, ...]


def prefix_tree(token_ids: Sequence[Int[np.ndarray, " _"]]) -> list[Segment]:
    """Builds the prefix tree of the generations of one prompt (paper §6.1).

    A segment ends where its generations branch or one of them ends, so the number of segments that contain position h
    equals the number of active branches at h. Empty generations are not in any segment.

    Args:
      token_ids: Token ids of the generations of one prompt, without padding.

    Returns:
      Segments, with parents before their children.
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
            end = min(shared_prefix(first, token_ids[member]) for member in members)
            unfinished.append((end, len(segments), members))
            segments.append(Segment(start, end, parent, tuple(members)))
    return segments


def shared_prefix(a: Int[np.ndarray, " _"], b: Int[np.ndarray, " _"]) -> int:
    """Returns the length of the common prefix."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
