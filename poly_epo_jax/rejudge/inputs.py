"""Reads the recorded responses that judges cluster: folders of runs and evaluations, and files from elsewhere."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.records.run_folder import GENERATION, GENERATIONS
from poly_epo_jax.system.json_files import Row, read_rows
from poly_epo_jax.system.output_folder import check_contents
from poly_epo_jax.tasks.problems import read_source
from poly_epo_jax.types import Generation, Group, Outcome, Problem, Task


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
        arrays = np.zeros(1, np.int32), np.zeros(1, np.float32), np.ones(1, bool)
        versions = np.full(1, seed)

        def generation(index: int) -> Generation:
            if self.turns is None:
                return Generation(*arrays, (self.responses[index],), "stop", versions)
            outcome = Outcome(self.rewards[index], self.strategies[index])
            return Generation(*arrays, self.turns[index], "stop", versions, outcome)

        return Group(self.problem, arrays[0], tuple(generation(index) for index in order))


@dataclasses.dataclass
class RecordedTask:
    """The task of judges that only read the texts of responses.

    Attributes:
      train_problems: Problems of the input.
      held_out_problems: Empty.
    """

    train_problems: Sequence[Problem]
    held_out_problems: Sequence[Problem] = ()


def read_inputs(inputs: Sequence[str], max_problems: int = 0) -> list[RecordedGroup]:
    """Reads recorded responses.

    Args:
      inputs: Folders that contain generations.jsonl (a run, or a model of an evaluation), such files, or sources of
        `tasks.problems.read_source` whose rows have the columns `problem` (text), `responses` and `rewards`, and
        optionally `id` and `answer`.
      max_problems: Maximum number of problems, spread evenly over all inputs. 0 selects all problems.

    Returns:
      The groups, in the order of the inputs.

    Raises:
      ValueError: If a row is invalid, a problem has fewer than two responses, or two problems have the same name.
      OSError: If an input is missing or cannot be read.
    """
    groups = []
    for source in inputs:
        prefix = f"{source.rstrip('/')}: " if len(inputs) > 1 else ""
        groups += [dataclasses.replace(group, name=prefix + group.name) for group in _read_input(source)]
    names = Counter(group.name for group in groups)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"{', '.join(inputs)} contain {repeated[0]!r} twice; give each problem its own id.")
    for group in groups:
        if len(group.responses) < 2:
            raise ValueError(
                f"{', '.join(inputs)} contain a single response to {group.name!r}, but clusters require at least two."
            )
    if not groups:
        raise ValueError(f"{', '.join(inputs)} contain no responses.")
    if 0 < max_problems < len(groups):
        groups = [groups[index] for index in np.linspace(0, len(groups) - 1, max_problems).round().astype(int)]
    return groups


def with_answers(groups: Sequence[RecordedGroup], task: Task) -> list[RecordedGroup]:
    """Returns the groups with the problems of the task, which judges that use the task require.

    Raises:
      ConfigError: If a problem has no answer in the input, and the task does not have it either.
    """
    known = {problem.id: problem for problem in (*task.train_problems, *task.held_out_problems)}
    found = []
    for group in groups:
        problem = group.problem
        if not problem.answer:
            problem = known.get(problem.id)
            if problem is None or problem.prompt != group.problem.prompt:
                raise ConfigError(
                    f"The task of --config does not contain the problem {group.problem.id!r} of {group.name!r}; use "
                    "the configuration of the run, or a judge that does not require the task."
                )
        found.append(dataclasses.replace(group, problem=problem))
    return found


def _read_input(source: str) -> list[RecordedGroup]:
    path = Path(source)
    if path.is_dir():
        check_contents(path)
        path /= GENERATIONS
        if not path.is_file():
            raise FileNotFoundError(
                f"{source} does not contain {GENERATIONS}; specify a run folder, the folder BENCHMARK/MODEL of an "
                "evaluation, or a file."
            )
    if path.name == GENERATIONS:
        return _read_generations(read_rows(path, GENERATION))
    return [_read_group(row, f"{source}, row {number}", number) for number, row in enumerate(read_source(source), 1)]


def _read_generations(rows: Iterable[Row]) -> list[RecordedGroup]:
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


def _read_group(row: Mapping[str, Any], place: str, number: int) -> RecordedGroup:
    """Reads a row with a problem and its responses.

    Args:
      row: The row.
      place: Place of the row, for error messages.
      number: Number of the row, which names a problem without an id.
    """
    match row:
        case {"problem": str(prompt), "responses": [*responses], "rewards": [*rewards]}:
            pass
        case _:
            raise ValueError(f"{place} must have the columns problem (text), responses (texts) and rewards (numbers).")
    if not all(isinstance(response, str) for response in responses) or len(rewards) != len(responses):
        raise ValueError(f"{place} must have a text in responses, and a number in rewards, for each response.")
    if not all(type(reward) in (int, float) and 0 <= reward <= 1 for reward in rewards):
        raise ValueError(f"{place} has rewards that are not numbers from 0 to 1; correct them.")
    name = str(row.get("id", f"row {number}"))
    numbers = tuple(map(float, rewards))
    problem = Problem(name, prompt, str(row.get("answer", "")))
    return RecordedGroup(name, problem, tuple(responses), numbers, tuple(reward == 1 for reward in numbers))
