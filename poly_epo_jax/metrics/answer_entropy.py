"""How widely a policy's final answers to a problem are spread."""

import numpy as np
from jaxtyping import Float, Int


def answer_entropy(answers: Int[np.ndarray, "problems generations"]) -> Float[np.ndarray, " problems"]:
    """Entropy in nats of a problem's distinct answers: sum_a p_a ln(1 / p_a), p_a the share of its generations.

    From 0, when all generations agree, to ln(generations), when no two do. Generations without an answer (id -1) count
    as one answer of their own. This is the discrete semantic entropy of Farquhar et al. 2024 (Nature 630, 625-630),
    with the task's grader deciding which answers mean the same. An estimate from few generations is too low: compare
    equal numbers of them.
    """
    return np.array([_entropy(ids) for ids in answers], dtype=np.float64)


def _entropy(ids: Int[np.ndarray, " generations"]) -> float:
    _, counts = np.unique(ids, return_counts=True)
    return float(np.sum(counts / len(ids) * np.log(len(ids) / counts)))
