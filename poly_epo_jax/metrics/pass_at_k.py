"""pass@k, the expected best reward of k generations, and Cover@tau."""

import numpy as np
from jaxtyping import Bool, Float, Int


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
    return 1 - np.cumprod(np.concatenate([[1.0], np.maximum(rest - k, 0) / rest]))[num_correct]


def best_of_k(rewards: Float[np.ndarray, "P m"], k: int) -> Float[np.ndarray, " P"]:
    """Returns the unbiased estimate of the expected largest reward among k generations.

    This is the mean of the largest reward over all C(m, k) subsets. For rewards 0 and 1, it equals pass@k.

    Args:
      rewards: Rewards of the m generations of each of P problems.
      k: Number of generations that are drawn, at most m.

    Raises:
      ValueError: If not 1 <= k <= m.
    """
    num_generations = rewards.shape[1]
    # A subset has its largest reward among the i smallest rewards if it contains none of the m - i others.
    in_smallest = 1 - pass_at_k(num_generations, np.arange(num_generations, -1, -1), k)
    return np.sort(rewards, axis=1) @ np.diff(in_smallest)


def is_covered(tau: float, correct: Bool[np.ndarray, "P m"]) -> Float[np.ndarray, " P"]:
    """Returns 1 for each problem with a fraction of correct generations of at least tau, otherwise 0.

    The mean over problems is the plug-in estimate of Cover@tau (arXiv:2510.08325), the fraction of problems whose
    probability of a correct generation is at least tau. It is biased by problems with a probability near tau, and
    consistent in m. Unbiased estimates do not exist, because the expectation of any function of m generations is a
    polynomial in the probability.

    Args:
      tau: Fraction, in (0, 1].
      correct: Whether each of the m generations of P problems is correct.
    """
    return (correct.mean(axis=1) >= tau).astype(float)
