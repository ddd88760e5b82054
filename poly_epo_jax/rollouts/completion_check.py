"""Validates completions from inference servers.

Training on a single invalid token could corrupt the weights permanently.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from poly_epo_jax.types import FinishReason

MIN_LOGPROB = -1000.0
"""Minimum valid log-probability. Tokens this unlikely are never sampled: exp(-1000) is far below the float32 range."""


def completion_flaw(
    token_ids: Int[np.ndarray, " T"],
    logprobs: Float[np.ndarray, " U"],
    finish_reason: FinishReason,
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
    vocab_size: int,
) -> str:
    """Describes the first defect of a completion.

    Args:
      token_ids: Generated tokens [T].
      logprobs: Log-probabilities [U]. A valid completion has U = T.
      finish_reason: Reason why the generation ended.
      max_tokens: Maximum number of tokens of the request.
      stop_ids: Token ids that end a generation.
      vocab_size: Size of the vocabulary.

    Returns:
      A description of the defect, or an empty string if the completion is valid.
    """
    if not 0 < len(token_ids) <= max_tokens or len(token_ids) != len(logprobs):
        return f"{len(token_ids)} tokens with {len(logprobs)} log-probabilities, but 1 to {max_tokens} were requested"
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if outside.size:
        return f"token {outside[0]} is not in the vocabulary of {vocab_size} tokens"
    impossible = logprobs[~((logprobs >= MIN_LOGPROB) & (logprobs <= 0))]  # Also selects NaN.
    if impossible.size:
        return f"log-probability {impossible[0]} is not between {MIN_LOGPROB:g} and 0"
    stops = np.isin(token_ids, np.asarray(stop_ids, np.int64))
    if stops[:-1].any():
        return f"tokens follow the stop token {token_ids[stops][0]}"
    if stops[-1] != (finish_reason == "stop"):
        return (
            f"finish reason {finish_reason} with last token {token_ids[-1]}, but the stop tokens are {sorted(stop_ids)}"
        )
    if finish_reason == "length" and len(token_ids) < max_tokens:
        return f"finish reason length after {len(token_ids)} tokens, but the limit is {max_tokens}"
    return ""
