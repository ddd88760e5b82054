"""Judge that clusters responses by their final answers."""

from collections.abc import Callable, Hashable, Sequence

from poly_epo_jax.judges.exact import clusters_of
from poly_epo_jax.system.daemon_thread import in_daemon_thread
from poly_epo_jax.types import Clustering, Group, HasAnswers


class AnswerJudge:
    """Clusters generations by their final answers, which are compared with `task.same_answer`.

    Args:
      task: Extracts and compares the answers.
    """

    def __init__(self, task: HasAnswers):
        self._task = task

    async def cluster(self, group: Group) -> Clustering:
        """Returns one cluster per answer. Generations without an answer are in `DEGENERATE_CLUSTER`.

        Raises:
          ValueError: If the task returns an answer that is not a string.
        """
        return clusters_of(await in_daemon_thread(lambda: self._first_equals(group)))

    def _first_equals(self, group: Group) -> list[int | None]:
        problem = group.problem
        answers = final_answers(self._task, group)
        return first_equal_index(
            answers, lambda i, j: self._task.same_answer(problem, answers[i] or "", answers[j] or "")
        )


def final_answers(task: HasAnswers, group: Group) -> list[str | None]:
    """Returns the final answers of the generations of a group, and None for missing answers.

    Args:
      task: Extracts the answers.
      group: The group.

    Raises:
      ValueError: If the task returns an answer that is not a string.
    """
    answers = [task.answer(group.problem, generation) for generation in group.generations]
    for answer in answers:
        if not isinstance(answer, str | None):
            raise ValueError(
                f"{type(task).__name__}.answer returned {answer!r} ({type(answer).__name__}) for problem "
                f"{group.problem.id}; return a string, or None if the response has no answer."
            )
    return answers


def first_equal_index(answers: Sequence[Hashable | None], same: Callable[[int, int], bool]) -> list[int | None]:
    """Returns, for each answer, the index of the first equal answer, or None for missing answers.

    Args:
      answers: Spellings of the answers, with any other data that distinguishes two answers. None is a missing answer.
      same: Function that returns True if the answers at two indices are equal. It is not called for identical entries.
    """
    spelled: dict[Hashable, int] = {}  # index of the first equal answer, by spelling
    for index, answer in enumerate(answers):
        if answer is not None and answer not in spelled:
            firsts = dict.fromkeys(spelled.values())
            spelled[answer] = next((first for first in firsts if same(first, index)), index)
    return [None if answer is None else spelled[answer] for answer in answers]
