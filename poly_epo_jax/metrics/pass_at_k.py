"""pass@k: the chance that at least one of k generations is correct."""

import numpy as np
from jaxtyping import Float, Int


def pass_at_k(num_generations: int, num_correct: Int[np.ndarray, " P"], k: int) -> Float[np.ndarray, " P"]:
    """Unbiased estimate of pass@k from m generations of which c are correct: 1 - C(m - c, k) / C(m, k).

    Args:
      num_generations: m, the same for all P prompts.
      num_correct: c of each prompt.
      k: how many generations the estimated user draws, at most m.

    Raises:
      ValueError: unless 1 <= k <= m and 0 <= c <= m.
    """
    if not 1 <= k <= num_generations:
        raise ValueError(f"k is {k}, but must lie between 1 and num_generations, {num_generations}.")
    if np.any((num_correct < 0) | (num_correct > num_generations)):
        raise ValueError(f"num_correct must lie between 0 and num_generations, {num_generations}.")
    # The ratio of binomials as a running product over c, each factor in [0, 1]: nothing overflows for any m.
    rest = num_generations - np.arange(num_generations)
    all_wrong = np.cumprod(np.concatenate([[1.0], np.maximum(rest - k, 0) / rest]))
    return 1 - all_wrong[num_correct]
