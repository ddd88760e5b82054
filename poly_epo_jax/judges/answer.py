"""Judge that clusters responses by their final answers."""

from collections.abc import Callable, Hashable, Sequence

from poly_epo_jax.judges.exact import clusters_of
from poly_epo_jax.system.daemon_thread import in_daemon_thread
from poly_epo_jax.types import Clustering, ComparesAnswers, Group, HasAnswers


class AnswerJudge:
    """Clusters generations by their final answers, which `task.same_answer` compares if the task has this method.

    Args:
      task: Extracts the answers, and may compare them.
    """

    def __init__(self, task: HasAnswers):
        self._task, self.parts = task, (task,)

    async def cluster(self, group: Group) -> Clustering:
        """Returns one cluster per answer. Generations without an answer are in `DEGENERATE_CLUSTER`.

        Raises:
          ValueError: If the task returns an answer that is not a string.
        """
        return clusters_of(await in_daemon_thread(lambda: self._first_equals(group)))

    def _first_equals(self, group: Group) -> list[int | None]:
        task, answers = self._task, final_answers(self._task, group)
        if not isinstance(task, ComparesAnswers):
            return first_equal_index(answers)
        return first_equal_index(
            answers, lambda i, j: task.same_answer(group.problem, answers[i] or "", answers[j] or "")
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
                f"{group.problem.id!r}; return a string, or None if the response has no answer."
            )
    return answers


def first_equal_index(
    answers: Sequence[Hashable | None], same: Callable[[int, int], bool] | None = None
) -> list[int | None]:
    """Returns, for each answer, the index of the first equal answer, or None for missing answers.

    Args:
      answers: Spellings of the answers, with any other data that distinguishes two answers. None is a missing answer.
      same: Function that returns True if the answers at two indices are equal. It is not called for identical entries.
        If None, only identical entries are equal.
    """
    spelled: dict[Hashable, int] = {}  # index of the first equal answer, by spelling
    for index, answer in enumerate(answers):
        if answer is not None and answer not in spelled:
            firsts = dict.fromkeys(spelled.values()) if same else ()
            spelled[answer] = next((first for first in firsts if same and same(first, index)), index)
    return [None if answer is None else spelled[answer] for answer in answers]
