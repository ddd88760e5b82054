"""majority@k: the accuracy and vote share of the most frequent answer among k generations."""

import functools
import itertools
import math

import numpy as np
from jaxtyping import Bool, Float, Int

from poly_epo_jax.metrics.agreement import entropy

NO_ANSWER = -1
"""Answer id of generations without an answer."""


def majority_at_k(
    answers: Int[np.ndarray, "problems generations"],
    correct: Bool[np.ndarray, "problems generations"],
    k: int,
    num_subsets: int = 1000,
    seed: int = 0,
) -> tuple[Float[np.ndarray, " problems"], Float[np.ndarray, " problems"]]:
    """Computes the accuracy and the vote share of the most frequent answer of each problem.

    This is self-consistency (Wang et al. 2023, arXiv:2203.11171; paper §6.1, majority voting). The result is the mean
    over subsets of k generations of a problem:
      accuracy = (number of correct winners) / (number of winners), which breaks ties at random in expectation,
      vote share = (number of votes of a winner) / k.
    The winners are the most frequent answers. A generation without an answer does not vote, but counts among the k. If
    no generation votes, accuracy and vote share are 0.

    If there are at most `num_subsets` subsets, all of them are used and the result is exact. Otherwise, `num_subsets`
    random subsets are used, the same for all problems.

    Args:
      answers: Non-negative answer ids, equal for answers that the task considers equal, or `NO_ANSWER`. Ids are
        compared only within a problem.
      correct: Whether each answer is correct, the same for equal answers. Ignored for generations without an answer.
      k: Number of generations in a subset, from 1 to the number of generations.
      num_subsets: Number of random subsets per problem, and the maximum number of subsets that are enumerated.
      seed: Seed of the random subsets.

    Returns:
      Accuracy and vote share of each problem, both in [0, 1].

    Raises:
      ValueError: If not 1 <= k <= generations, if an id is below `NO_ANSWER`, or if only some of several equal answers
        are correct.
    """
    num_problems, num_generations = answers.shape
    if not 1 <= k <= num_generations:
        raise ValueError(f"k={k} must lie between 1 and the number of generations, {num_generations}.")
    if np.any(answers < NO_ANSWER):
        raise ValueError(f"answers must be non-negative ids, or {NO_ANSWER} for a missing answer.")

    if math.comb(num_generations, k) <= num_subsets:
        subsets = np.array(list(itertools.combinations(range(num_generations), k)))
    else:
        indices = np.tile(np.arange(num_generations), (num_subsets, 1))
        subsets = np.random.default_rng(seed).permuted(indices, axis=1)[:, :k]
    accuracy, vote_share = np.zeros(num_problems), np.zeros(num_problems)
    for problem in range(num_problems):
        ids, votes_for = np.unique(answers[problem], return_inverse=True)
        is_correct = _correct_answers(votes_for, correct[problem], ids)
        votes = _count(votes_for[subsets], len(ids))
        votes[:, ids == NO_ANSWER] = 0
        most = votes.max(axis=1, keepdims=True)
        wins = (votes == most) & (most > 0)
        accuracy[problem] = np.mean(wins @ is_correct / np.maximum(wins.sum(axis=1), 1))
        vote_share[problem] = np.mean(most) / k
    return accuracy, vote_share


def _correct_answers(
    answer_of: Int[np.ndarray, " generations"],
    correct: Bool[np.ndarray, " generations"],
    ids: Int[np.ndarray, " answers"],
) -> Float[np.ndarray, " answers"]:
    """Returns 1 for correct answers and 0 for incorrect ones."""
    share = np.bincount(answer_of, weights=correct) / np.bincount(answer_of)
    mixed = (share > 0) & (share < 1) & (ids != NO_ANSWER)
    if np.any(mixed):
        raise ValueError(f"Equal answers must all be correct or all be incorrect, but id {ids[mixed][0]} has both.")
    return share


def _count(ballots: Int[np.ndarray, "subsets k"], num_answers: int) -> Int[np.ndarray, "subsets answers"]:
    """Counts the votes for each answer in each subset, with a single bincount over separate id ranges per subset."""
    num_subsets = len(ballots)
    offsets = num_answers * np.arange(num_subsets)[:, None]
    counts = np.bincount((ballots + offsets).ravel(), minlength=num_subsets * num_answers)
    return counts.reshape(num_subsets, num_answers)


def answer_entropy(answers: Int[np.ndarray, "problems generations"]) -> Float[np.ndarray, " problems"]:
    """Returns the entropy of the distinct answers of each problem, in nats: sum_a p_a ln(1 / p_a).

    p_a is the fraction of generations with answer a. The entropy is 0 if all answers are equal, and ln(generations) if
    all differ. Missing answers (`NO_ANSWER`) count as one answer. This is the discrete semantic entropy of Farquhar et
    al. 2024 (Nature 630, 625-630), where the task decides which answers are equal. Estimates from few generations are
    too low, so only compare estimates from equal numbers of generations.
    """
    return np.array([entropy(np.unique(ids, return_counts=True)[1]) for ids in answers], dtype=np.float64)


def cached_majority_at_k(
    answers: Int[np.ndarray, "problems generations"], correct: Bool[np.ndarray, "problems generations"], k: int
) -> tuple[Float[np.ndarray, " problems"], Float[np.ndarray, " problems"]]:
    """Returns `majority_at_k`. The metrics of accuracy and vote share share one computation."""
    return _cached(answers.astype(int).tobytes(), correct.tobytes(), len(answers), k)


@functools.lru_cache(maxsize=32)
def _cached(answers: bytes, correct: bytes, num_problems: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    shape = num_problems, -1
    return majority_at_k(np.frombuffer(answers, int).reshape(shape), np.frombuffer(correct, bool).reshape(shape), k)
