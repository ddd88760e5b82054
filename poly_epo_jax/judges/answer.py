"""The judge for tasks whose responses give answers: one cluster for each answer."""

import asyncio
from collections.abc import Callable, Hashable, Sequence

from poly_epo_jax.judges.exact import clusters_of
from poly_epo_jax.types import Clustering, Group, Voting


class AnswerJudge:
    """Clusters by the final answer: generations share a cluster if `task.same_answer` says their answers are equal."""

    def __init__(self, task: Voting):
        self._task = task

    async def cluster(self, group: Group) -> Clustering:
        """A generation without an answer is in `DEGENERATE_CLUSTER`."""
        return clusters_of(await asyncio.to_thread(self._first_equals, group))

    def _first_equals(self, group: Group) -> list[int | None]:
        problem = group.problem
        answers = [self._task.answer(problem, generation) for generation in group.generations]
        return first_equals(answers, lambda i, j: self._task.same_answer(problem, answers[i] or "", answers[j] or ""))


def first_equals(answers: Sequence[Hashable | None], same: Callable[[int, int], bool]) -> list[int | None]:
    """For each answer, the index of the first answer that equals it; None where there is no answer.

    Args:
      answers: their spellings, and anything else that distinguishes two of them.
      same: whether the answers at two indices are equal; identical entries are equal without being compared.
    """
    spelled: dict[Hashable, int] = {}  # for each spelling, the index of the first answer that equals it
    for place, answer in enumerate(answers):
        if answer is not None and answer not in spelled:
            firsts = dict.fromkeys(spelled.values())
            spelled[answer] = next((first for first in firsts if same(first, place)), place)
    return [None if answer is None else spelled[answer] for answer in answers]
