"""Reads the recorded responses that judges cluster: folders of runs and evaluations, and files from elsewhere."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.records.recorded_groups import RecordedGroup, read_generations
from poly_epo_jax.records.run_folder import GENERATION, GENERATIONS
from poly_epo_jax.system.json_files import read_rows
from poly_epo_jax.system.output_folder import check_contents
from poly_epo_jax.tasks.problems import read_source
from poly_epo_jax.types import Problem, Task


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
    groups = [
        dataclasses.replace(group, name=f"{source.rstrip('/')}: {group.name}") if len(inputs) > 1 else group
        for source in inputs
        for group in _read_input(source)
    ]
    if repeated := [name for name, count in Counter(group.name for group in groups).items() if count > 1]:
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
        return read_generations(read_rows(path, GENERATION))
    return [_read_group(row, f"{source}, row {number}", number) for number, row in enumerate(read_source(source), 1)]


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
    name, numbers = str(row.get("id", f"row {number}")), tuple(map(float, rewards))
    return RecordedGroup(
        name,
        Problem(name, prompt, str(row.get("answer", ""))),
        tuple(responses),
        numbers,
        tuple(reward == 1 for reward in numbers),
    )
