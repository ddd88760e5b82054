"""majority@k: k generations vote with their final answers, and the most frequent answer is the one given."""

import itertools
import math

import numpy as np
from jaxtyping import Bool, Float, Int

NO_ANSWER = -1
"""The answer id of a generation that gives none."""


def majority_at_k(
    answers: Int[np.ndarray, "problems generations"],
    correct: Bool[np.ndarray, "problems generations"],
    k: int,
    num_subsets: int = 1000,
    seed: int = 0,
) -> tuple[Float[np.ndarray, " problems"], Float[np.ndarray, " problems"]]:
    """Accuracy of the winning answer and its share of the votes, each a number in [0, 1] for each problem.

    Self-consistency (Wang et al. 2023, arXiv:2203.11171; paper §6.1, majority voting), as the mean over k-subsets of a
    problem's generations, drawn without replacement:
      accuracy = (correct ones among the tied winners) / (tied winners), the expectation of breaking ties at random;
      vote share = (votes of a winner) / k.
    A generation without an answer casts no vote, but is one of the k. If nobody votes, both are 0.

    If there are at most `num_subsets` subsets, all are used and the result is exact; otherwise, `num_subsets` random
    ones are used.

    Args:
      answers: ids from 0 on, equal for answers that the task's grader considers equal, or `NO_ANSWER`. An id has a
        meaning only within its problem.
      correct: whether each answer is correct, the same for equal answers. It is not read where there is no answer.
      k: how many generations vote, at most all.
      num_subsets: how many subsets are drawn for each problem, and the most that are enumerated.
      seed: equal seeds give equal estimates.

    Raises:
      ValueError: unless 1 <= k <= generations and num_subsets >= 1, for ids below `NO_ANSWER`, and for equal answers of
        which some are correct.
    """
    num_problems, num_generations = answers.shape
    if not 1 <= k <= num_generations:
        raise ValueError(f"k is {k}, but must lie between 1 and the number of generations, {num_generations}.")
    if np.any(answers < NO_ANSWER):
        raise ValueError(f"answers must be ids from 0 on, or {NO_ANSWER} for no answer.")

    all_subsets = None
    if math.comb(num_generations, k) <= num_subsets:
        all_subsets = np.array(list(itertools.combinations(range(num_generations), k)))
    rng = np.random.default_rng(seed)
    accuracy, vote_share = np.zeros(num_problems), np.zeros(num_problems)
    for problem in range(num_problems):
        subsets = _random_subsets(num_generations, k, num_subsets, rng) if all_subsets is None else all_subsets
        ids, votes_for = np.unique(answers[problem], return_inverse=True)
        is_correct = _correct_answers(votes_for, correct[problem], ids)
        votes = _count(votes_for[subsets], len(ids))
        votes[:, ids == NO_ANSWER] = 0
        most = votes.max(axis=1, keepdims=True)
        wins = (votes == most) & (most > 0)
        accuracy[problem] = np.mean(wins @ is_correct / np.maximum(wins.sum(axis=1), 1))
        vote_share[problem] = np.mean(most) / k
    return accuracy, vote_share


def _random_subsets(
    num_generations: int, k: int, num_subsets: int, rng: np.random.Generator
) -> Int[np.ndarray, "subsets k"]:
    places = np.tile(np.arange(num_generations), (num_subsets, 1))
    return rng.permuted(places, axis=1)[:, :k]


def _correct_answers(
    answer_of: Int[np.ndarray, " generations"],
    correct: Bool[np.ndarray, " generations"],
    ids: Int[np.ndarray, " answers"],
) -> Float[np.ndarray, " answers"]:
    """1 for each answer that is correct, 0 for the others."""
    share = np.bincount(answer_of, weights=correct) / np.bincount(answer_of)
    mixed = (share > 0) & (share < 1) & (ids != NO_ANSWER)
    if np.any(mixed):
        raise ValueError(f"Equal answers must be all correct or all wrong, but those of id {ids[mixed][0]} are both.")
    return share


def _count(ballots: Int[np.ndarray, "subsets k"], num_answers: int) -> Int[np.ndarray, "subsets answers"]:
    """Votes for each answer in each subset: one bincount, in which every subset has its own range of ids."""
    num_subsets = len(ballots)
    offsets = num_answers * np.arange(num_subsets)[:, None]
    counts = np.bincount((ballots + offsets).ravel(), minlength=num_subsets * num_answers)
    return counts.reshape(num_subsets, num_answers)


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
