"""Generates, grades and clusters the responses of a model to a benchmark, and writes each problem when it completes."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from poly_epo_jax.evaluate.benchmarks import Benchmark
from poly_epo_jax.evaluate.folder import EVALUATED_GENERATION, GENERATIONS, read_generations
from poly_epo_jax.judges.answer import final_answers, first_equal_index
from poly_epo_jax.metrics.majority import NO_ANSWER
from poly_epo_jax.records.run_folder import generation_rows
from poly_epo_jax.rollouts.grading import (
    CallFailure,
    EpisodeError,
    environment_failures,
    grade_groups,
    left_out_groups,
    limited_call,
)
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.system.daemon_thread import in_daemon_thread
from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.system.json_files import Row, append_rows, keep_rows, sort_rows
from poly_epo_jax.types import ComparesAnswers, GradedGroup, HasAnswers, Judge, Problem, Sampling, Task


async def draw_generations(
    folder: Path,
    rollouts: Rollouts,
    benchmark: Benchmark,
    judge: Judge,
    num_generations: int,
    sampling: Sampling,
    show: Callable[[int], None],
) -> dict[str, str]:
    """Generates the missing responses of an evaluation. Problems that an earlier call completed are skipped.

    A problem fails if its environment, reward or server fails on all responses. All other problems are completed. Rows
    of problems that are incomplete or have failed responses are removed first, and the problems are generated again.

    Args:
      folder: Folder of the model on the benchmark, see `open_folder`.
      rollouts: Generates the responses.
      benchmark: The benchmark.
      judge: Clusters the responses of each problem.
      num_generations: Number of generations per problem.
      sampling: Sampling parameters.
      show: Called with the number of completed problems.

    Returns:
      The reasons of the problems that failed, by id. generations.jsonl does not contain them.

    Raises:
      ValueError: If generations.jsonl is corrupted or contains generations of problems outside the benchmark, or if the
        task or the judge returns an invalid value.
    """
    path, task = folder / GENERATIONS, benchmark.task
    positions = {problem.id: position for position, problem in enumerate(benchmark.problems)}
    complete = _complete_problems(folder, positions, num_generations)
    show(len(complete))
    missing = [problem for problem in benchmark.problems if problem.id not in complete]
    failed, limit = dict[str, str](), rollouts.grading_timeout_seconds

    async def write(graded: GradedGroup) -> None:
        problem = graded.group.problem
        rows = await limited_call(in_daemon_thread(lambda: _rows(graded, task)), task, "answer", problem, limit)
        if isinstance(rows, CallFailure):
            failed[problem.id] = rows.reason
            return
        append_rows(path, rows)
        complete.add(problem.id)
        show(len(complete))

    if missing:
        groups = rollouts.generate(missing, num_generations, sampling)
        try:
            graded = await grade_groups(groups, missing, task, judge, write, timeout_seconds=limit)
            failed |= {one.group.problem.id: environment_failures([one])[0].reason for one in left_out_groups(graded)}
        except (ServerError, EpisodeError) as error:  # no further problem can be evaluated
            failed = {one.id: str(error) for one in missing if one.id not in complete} | failed
    # Problems complete in arbitrary order. Sorting makes the file independent of this order.
    sort_rows(path, EVALUATED_GENERATION, lambda row: (positions[row["problem"]], row["generation"]))
    return failed


def _complete_problems(folder: Path, known: Collection[str], num_generations: int) -> set[str]:
    """Returns the problems that an earlier call completed, and removes the rows of other problems."""
    counts = Counter(row["problem"] for row in read_generations(folder) if row["reward"] is not None)
    if others := counts.keys() - set(known):
        raise ValueError(
            f"{folder} contains generations of {len(others)} problems that are not selected; select them too, or "
            "choose another --output."
        )
    complete = {problem for problem, count in counts.items() if count == num_generations}
    keep_rows(folder / GENERATIONS, EVALUATED_GENERATION, lambda row: row["problem"] in complete)
    return complete


def _rows(graded: GradedGroup, task: Task) -> list[Row]:
    """Returns a row with the columns of `EVALUATED_GENERATION` for each generation of the group."""
    problem, generations = graded.group.problem, graded.group.generations
    answers = final_answers(task, graded.group) if isinstance(task, HasAnswers) else [None] * len(generations)
    ids = _answer_ids(task, problem, answers, graded.correct)
    own_columns = [
        {
            "token_ids": y.token_ids.tolist(),
            "finish_reason": y.finish_reason,
            "answer": ids[index],
            "answer_text": answers[index],
        }
        for index, y in enumerate(generations)
    ]
    of_generation = dict(zip(graded.group.indices, own_columns, strict=True))
    nothing = {"token_ids": [], "finish_reason": "", "answer": NO_ANSWER, "answer_text": None}
    gold = {"gold": str(problem.answer)}
    return [row | gold | of_generation.get(row["generation"], nothing) for row in generation_rows(graded)]


def _answer_ids(task: Task, problem: Problem, answers: Sequence[str | None], correct: np.ndarray) -> list[int]:
    """Numbers the answers in order of first appearance. Answers that the task considers equal have the same number.

    A correct and an incorrect answer never have the same number, even if their text is identical: the reward can depend
    on the derivation, the equality of a grader is not transitive, and a comparison that timed out can succeed later.
    """

    votes = [None if answer is None else (answer, bool(correct[i])) for i, answer in enumerate(answers)]
    if isinstance(task, ComparesAnswers):
        firsts = first_equal_index(
            votes,
            lambda i, j: (
                bool(correct[i] == correct[j]) and task.same_answer(problem, answers[i] or "", answers[j] or "")
            ),
        )
    else:
        firsts = first_equal_index(votes)
    numbers = {first: number for number, first in enumerate(sorted({first for first in firsts if first is not None}))}
    return [NO_ANSWER if first is None else numbers[first] for first in firsts]
