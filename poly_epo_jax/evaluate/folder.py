"""The folder of an evaluation: EVALUATION/<benchmark>/<model>/. Needs no JAX.

about.json           the model, benchmark, sampling and judge that the generations come from, see about.py
generations.jsonl    one row per generation, with the columns of `EVALUATED_GENERATION`
results.json         every metric with its interval, see results.py; docs/evaluation.md defines them
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poly_epo_jax.config.keys import changed_keys
from poly_epo_jax.records.run_folder import GENERATION
from poly_epo_jax.system.json_files import Columns, Row, read_rows, write_json

ABOUT, GENERATIONS, RESULTS = "about.json", "generations.jsonl", "results.json"

EVALUATED_GENERATION: Columns = {
    **GENERATION,
    "gold": str,  # the problem's answer
    "token_ids": list,
    "finish_reason": str,
    "answer": int,  # within a problem, equal numbers are one vote; -1: no answer
    "answer_text": str | None,
}


def open_folder(folder: Path, about: dict[str, Any]) -> None:
    """Creates the folder, or checks that its content has the same model, benchmark, sampling and judge.

    Raises:
      ValueError: one of them differs.
    """
    file = folder / ABOUT
    if file.exists():
        changed = changed_keys(json.loads(file.read_text()), about)
        if changed:
            raise ValueError(
                f"{folder} holds generations with another {', '.join(changed)}; choose another --output, or delete it."
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(file, about)


def read_generations(folder: Path) -> Iterator[Row]:
    """The complete rows of generations.jsonl, one at a time; none if it does not exist.

    Raises:
      ValueError: a row is damaged.
    """
    return read_rows(folder / GENERATIONS, EVALUATED_GENERATION)


def find_results(evaluation: Path) -> list[Path]:
    """The results.json of every benchmark and model in an evaluation, sorted by name."""
    return sorted(evaluation.glob(f"*/*/{RESULTS}"))
