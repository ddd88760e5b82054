"""Detection of responses that end in a loop."""

import numpy as np
from jaxtyping import Int

MIN_REPETITIONS = 4
"""Minimum number of times that the last tokens of a loop are repeated."""
MIN_TOKENS = 64
"""Minimum number of tokens of a loop, which excludes short repetitions such as a row of digits."""
_PROBE = 16  # number of tokens that are compared at all positions at once; less than any loop without its first period


def ends_in_loop(token_ids: Int[np.ndarray, " T"]) -> bool:
    """Returns True if the tokens end with a sequence that is repeated, without interruption, until the end.

    The sequence has any length p and occurs at least MIN_REPETITIONS times, the first time possibly in part, in at
    least MIN_TOKENS tokens. Loops in which a token changes, such as a counter, are not found.

    Args:
      token_ids: Tokens of a response, without its stop token.
    """
    reverse = token_ids[::-1]
    max_period = len(reverse) // MIN_REPETITIONS
    if len(reverse) < MIN_TOKENS:
        return False
    windows = np.lib.stride_tricks.sliding_window_view(reverse[1 : max_period + _PROBE], _PROBE)
    for period in (np.flatnonzero((windows == reverse[:_PROBE]).all(axis=1)) + 1).tolist():
        length = max(MIN_TOKENS, MIN_REPETITIONS * period)
        if np.array_equal(reverse[period:length], reverse[: length - period]):
            return True
    return False
