"""pass@k: the chance that at least one of k generations is correct."""

import numpy as np
from jaxtyping import Float, Int


def pass_at_k(num_samples: int, num_correct: Int[np.ndarray, "P"], k: int) -> Float[np.ndarray, "P"]:
    """Unbiased estimate of pass@k from m samples of which c are correct: 1 - C(m - c, k) / C(m, k).

    Args:
      num_samples: m, the same for all P prompts.
      num_correct: c of each prompt.
      k: how many samples the estimated user draws, at most m.

    Raises:
      ValueError: unless 1 <= k <= m and 0 <= c <= m.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}, but must lie between 1 and num_samples, {num_samples}.")
    if np.any((num_correct < 0) | (num_correct > num_samples)):
        raise ValueError(f"num_correct must lie between 0 and num_samples, {num_samples}.")
    # The ratio of binomials as a running product over c, each factor in [0, 1]: nothing overflows for any m.
    rest = num_samples - np.arange(num_samples)
    all_wrong = np.cumprod(np.concatenate([[1.0], np.maximum(rest - k, 0) / rest]))
    return 1 - all_wrong[num_correct]
