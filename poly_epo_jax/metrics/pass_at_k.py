"""pass@k: the probability that at least one of k generations is correct."""

import numpy as np
from jaxtyping import Float, Int


def pass_at_k(num_generations: int, num_correct: Int[np.ndarray, " P"], k: int) -> Float[np.ndarray, " P"]:
    """Returns the unbiased estimate of pass@k from m generations with c correct ones: 1 - C(m - c, k) / C(m, k).

    Args:
      num_generations: Number m of generations per problem.
      num_correct: Number c of correct generations of each of P problems.
      k: Number of generations that are drawn, at most m.

    Returns:
      pass@k of each problem.

    Raises:
      ValueError: If not 1 <= k <= m, or not 0 <= c <= m.
    """
    if not 1 <= k <= num_generations:
        raise ValueError(f"k={k} must lie between 1 and num_generations={num_generations}.")
    if np.any((num_correct < 0) | (num_correct > num_generations)):
        raise ValueError(f"num_correct must lie between 0 and num_generations={num_generations}.")
    # The ratio of binomials is a cumulative product over c with factors in [0, 1], which cannot overflow for large m.
    rest = num_generations - np.arange(num_generations)
    none_correct = np.cumprod(np.concatenate([[1.0], np.maximum(rest - k, 0) / rest]))
    return 1 - none_correct[num_correct]
