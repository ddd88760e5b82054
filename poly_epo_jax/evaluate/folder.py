"""Files of an evaluation, in EVALUATION/<benchmark>/<model>/. Does not require JAX.

about.json           model, benchmark, sampling parameters and judge, and digests of their content, see
                     `benchmarks.about_evaluation`
generations.jsonl    one row per generation, with the columns of `EVALUATED_GENERATION` and, for episodes, the
                     columns of `records.run_folder.EPISODE`
results.json         all metrics with their intervals, see results.py. docs/how_to/evaluate.md defines the metrics.
lock                 locked by the process that executes the evaluation
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poly_epo_jax.config.section import changed_keys
from poly_epo_jax.records.run_folder import GENERATION
from poly_epo_jax.system.json_files import Columns, Row, read_object, read_rows, write_json

ABOUT, GENERATIONS, RESULTS = "about.json", "generations.jsonl", "results.json"

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
    if file.exists() and (changed := changed_keys(read_object(file, "delete the folder"), about)):
        names = dict.fromkeys(key.removeprefix("digests.") for key in changed)
        raise ValueError(
            f"{folder} contains results with different values of {', '.join(names)}; restore them, choose another "
            "--output, or delete the folder."
        )
    write_json(file, about)


def read_generations(folder: Path) -> Iterator[Row]:
    """Yields the complete rows of generations.jsonl. Yields nothing if the file does not exist.

    Raises:
      ValueError: If a row is corrupted.
    """
    return read_rows(folder / GENERATIONS, EVALUATED_GENERATION)


def find_results(evaluation: Path) -> list[Path]:
    """Returns the paths of all results.json files of an evaluation, sorted by benchmark and model."""
    return sorted(evaluation.glob(f"*/*/{RESULTS}"))
