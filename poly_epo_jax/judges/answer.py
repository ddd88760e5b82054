"""The judge for tasks whose responses give answers: one cluster for each answer."""

import asyncio
from collections.abc import Callable, Hashable, Sequence

from poly_epo_jax.judges.exact import clusters_of
from poly_epo_jax.types import Clustering, Group, Voting


class AnswerJudge:
    """Clusters by the final answer: generations share a cluster where `task.same_answer` holds their answers equal."""

    def __init__(self, task: Voting):
        self._task = task

    async def cluster(self, group: Group) -> Clustering:
        """`DEGENERATE_CLUSTER` where there is no answer."""
        return clusters_of(await asyncio.to_thread(self._first_equals, group))

    def _first_equals(self, group: Group) -> list[int | None]:
        problem = group.problem
        answers = [self._task.answer(problem, generation) for generation in group.generations]
        return first_equals(answers, lambda i, j: self._task.same_answer(problem, answers[i] or "", answers[j] or ""))


def first_equals(answers: Sequence[Hashable | None], same: Callable[[int, int], bool]) -> list[int | None]:
    """For each answer the place of the first that equals it; None where there is none.

    Args:
      answers: their spellings, and whatever else tells two of them apart.
      same: whether the answers at two places are equal; answers of one spelling are, without being compared.
    """
    spelled: dict[Hashable, int] = {}  # each spelling, and the place of the first answer that equals it
    for place, answer in enumerate(answers):
        if answer is not None and answer not in spelled:
            firsts = dict.fromkeys(spelled.values())
            spelled[answer] = next((first for first in firsts if same(first, place)), place)
    return [None if answer is None else spelled[answer] for answer in answers]
