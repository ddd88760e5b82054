"""Groups of responses in generations.jsonl, in the form in which judges cluster them again."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from poly_epo_jax.system.json_files import Row
from poly_epo_jax.types import Generation, Group, Outcome, Problem


@dataclasses.dataclass(frozen=True)
class RecordedGroup:
    """The recorded responses to a problem.

    Attributes:
      name: Unique name within all inputs. It contains the step of a run, because a problem can occur in several steps.
      problem: The problem. Its answer is empty if the input does not contain it.
      responses: Texts of the N responses.
      rewards: Their rewards, in [0, 1].
      correct: Whether each response is correct.
      clusters: Cluster ids from the input. None if the input does not contain them.
      turns: Turns of each response. None if the responses are not episodes.
      strategies: Representations of the strategies of the episodes, or None for episodes without a strategy.
    """

    name: str
    problem: Problem
    responses: tuple[str, ...]
    rewards: tuple[float, ...]
    correct: tuple[bool, ...]
    clusters: tuple[int, ...] | None = None
    turns: tuple[tuple[str, ...], ...] | None = None
    strategies: tuple[str | None, ...] = ()

    def group(self, seed: int, order: Sequence[int]) -> Group:
        """Returns the group that a judge clusters.

        Args:
          seed: Number that selects the seeds of the judge. It is stored as the weight version of a placeholder token,
            from which the language model judge derives the seeds of its requests.
          order: Permutation of the indices of the responses.
        """

        def generation(index: int) -> Generation:
            if self.turns is None:
                return Generation.from_turns(self.responses[index], version=seed)
            outcome = Outcome(self.rewards[index], self.strategies[index])
            return Generation.from_turns(*self.turns[index], version=seed, outcome=outcome)

        return Group(self.problem, np.zeros(1, np.int32), tuple(generation(index) for index in order))


def read_generations(rows: Iterable[Row]) -> list[RecordedGroup]:
    """Returns the groups in rows with the columns of `run_folder.GENERATION`, without responses that have no reward.

    Args:
      rows: Rows of a run, an evaluation, or a step of a run.

    Raises:
      ValueError: If a reward is not between 0 and 1.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        step = f"step {row['step']}, " if "step" in row else ""
        occurrence = f" ({row['occurrence'] + 1})" if row.get("occurrence") else ""
        found.setdefault(f"{step}{row['problem']}{occurrence}", []).append(row)
    groups = []
    for name, rows_of_problem in found.items():
        of_problem = [row for row in rows_of_problem if row["reward"] is not None]  # without failed responses
        if len(of_problem) < min(2, len(rows_of_problem)):
            continue
        if not all(0 <= row["reward"] <= 1 for row in of_problem):
            raise ValueError(f"The generations of {name} have a reward that is not between 0 and 1; correct it.")
        of_problem.sort(key=lambda row: row["generation"])
        first, clusters = of_problem[0], tuple(row["cluster"] for row in of_problem)
        are_episodes = all(isinstance(row.get("turns"), list) for row in of_problem)
        groups.append(
            RecordedGroup(
                name,
                Problem(first["problem"], first["prompt"], first.get("gold", "")),
                tuple(row["response"] for row in of_problem),
                tuple(float(row["reward"]) for row in of_problem),
                tuple(row["correct"] for row in of_problem),
                None if None in clusters else clusters,
                tuple(tuple(row["turns"]) for row in of_problem) if are_episodes else None,
                tuple(row.get("strategy") for row in of_problem),
            )
        )
    return groups
