"""Checks every completion, whoever wrote it: one impossible token would ruin the weights for good."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from poly_epo_jax.types import FinishReason

LEAST_LOGPROB = -1000.0
"""No token of probability e^-1000 is ever drawn: float32 already rounds to zero at a tenth of that exponent."""


def completion_flaw(
    token_ids: Int[np.ndarray, " T"],
    logprobs: Float[np.ndarray, " U"],
    finish_reason: FinishReason,
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
    vocab_size: int,
) -> str:
    """What is wrong with a completion, as the end of a sentence about whoever wrote it; empty if nothing is wrong.

    Args:
      max_tokens: the request's limit.
      stop_ids: a completion ends with the first of these tokens.
    """
    if not 0 < len(token_ids) <= max_tokens or len(token_ids) != len(logprobs):
        return f"it wrote {len(token_ids)} tokens, with {len(logprobs)} log-probabilities; {max_tokens} were allowed"
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if outside.size:
        return f"it wrote token {outside[0]}, which is not in the vocabulary of {vocab_size}"
    impossible = logprobs[~((logprobs >= LEAST_LOGPROB) & (logprobs <= 0))]  # written so that NaN counts as impossible
    if impossible.size:
        return f"it wrote a token with log-probability {impossible[0]}, which is not between {LEAST_LOGPROB:g} and 0"
    stops = np.isin(token_ids, np.asarray(stop_ids, np.int64))
    if stops[:-1].any():
        return f"it went on after the stop token {token_ids[stops][0]}"
    if stops[-1] != (finish_reason == "stop"):
        return f"it ended by {finish_reason} with token {token_ids[-1]}; the stop tokens are {sorted(stop_ids)}"
    if finish_reason == "length" and len(token_ids) < max_tokens:
        return f"it ended by length with {len(token_ids)} tokens, where {max_tokens} were allowed"
    return ""
