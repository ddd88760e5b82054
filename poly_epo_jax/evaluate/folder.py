"""Files of an evaluation, in EVALUATION/<benchmark>/<model>/. Does not require JAX.

about.json           model, benchmark, sampling parameters and judge, and digests of their content, see
                     `benchmarks.about_evaluation`
generations.jsonl    one row per generation, with the columns of `EVALUATED_GENERATION` and, for episodes, the
                     columns of `records.run_folder.EPISODE`
results.json         all metrics with their intervals, see results.py. docs/how_to/evaluate.md defines the metrics.
failed.json          reasons of the problems that failed, by id. Only exists if problems failed
lock                 locked by the process that executes the evaluation
"""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from poly_epo_jax.config.section import changed_keys
from poly_epo_jax.records.run_folder import GENERATION
from poly_epo_jax.system.json_files import Columns, Row, read_object, read_rows, write_json

ABOUT, GENERATIONS, RESULTS, FAILED = "about.json", "generations.jsonl", "results.json", "failed.json"
MAX_SHOWN = 10  # maximum number of printed reasons of failed problems

EVALUATED_GENERATION: Columns = {
    **GENERATION,
    "gold": str,  # reference answer of the problem
    "token_ids": list,
    "finish_reason": str,
    "answer": int,  # id of the answer within the problem, shared by equal answers (-1 = no answer)
    "answer_text": str | None,
}
"""Columns of an evaluation's generations.jsonl. Problem and generation together identify a row."""


def open_folder(folder: Path, about: dict[str, Any]) -> None:
    """Creates the folder of an evaluation, or verifies that an existing folder has the same description.

    Args:
      folder: Folder of a model on a benchmark.
      about: Description of the evaluation, see `about_evaluation`.

    Raises:
      ValueError: If the folder contains results with another description.
    """
    file = folder / ABOUT
    if file.exists():
        changed = changed_keys(read_object(file, "delete the folder"), about)
        if changed:
            names = dict.fromkeys(key.removeprefix("digests.") for key in changed)
            raise ValueError(
                f"{folder} contains results with different values of {', '.join(names)}; restore them, choose "
                "another --output, or delete the folder."
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(file, about)


def read_generations(folder: Path) -> Iterator[Row]:
    """Yields the complete rows of generations.jsonl. Yields nothing if the file does not exist.

    Raises:
      ValueError: If a row is corrupted.
    """
    return read_rows(folder / GENERATIONS, EVALUATED_GENERATION)


def write_failed(folder: Path, failed: Mapping[str, str]) -> None:
    """Writes failed.json with the reasons of the problems that failed, by id. Removes it if no problem failed."""
    if failed:
        write_json(folder / FAILED, dict(failed))
    else:
        (folder / FAILED).unlink(missing_ok=True)


def failed_text(folder: Path, failed: Mapping[str, str]) -> str:
    """Returns a line for each of the first reasons, and a line with the number of failed problems and the remedy."""
    problems = dict[str, list[str]]()
    for problem, reason in failed.items():
        problems.setdefault(" ".join(reason.split()), []).append(problem)
    shown = [
        f"  {first}{f' and {len(others)} more' if others else ''}: {reason}"
        for reason, (first, *others) in itertools.islice(problems.items(), MAX_SHOWN)
    ]
    summary = f"{len(failed)} problems failed and are not in the results; {folder / FAILED} lists them."
    return "\n".join([*shown, f"{summary} Rerun the command to generate only these problems."])


def find_results(evaluation: Path) -> list[Path]:
    """Returns the paths of all results.json files of an evaluation, sorted by benchmark and model."""
    return sorted(evaluation.glob(f"*/*/{RESULTS}"))
