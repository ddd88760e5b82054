"""Reads problems with verifiable answers from files or Hugging Face datasets, and removes unusable problems."""

import collections
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from poly_epo_jax.types import Problem


@dataclasses.dataclass(frozen=True)
class Dropped:
    """Numbers of problems that `clean_problems` removed.

    Attributes:
      duplicates: Number of additional copies of problems.
      conflicting: Number of different problems whose copies have conflicting answers.
      held_out: Number of the remaining problems that are also held-out problems.
    """

    duplicates: int = 0
    conflicting: int = 0
    held_out: int = 0


@runtime_checkable
class Cleaned(Protocol):
    """A task that removed problems from its data.

    Attributes:
      dropped: Numbers of removed problems, by part ("train" and "held_out").
    """

    dropped: dict[str, Dropped]


def read_source(source: str) -> list[dict[str, Any]]:
    """Reads the rows of a file or dataset.

    Args:
      source: A `.jsonl` file, a `.parquet` file, or a Hugging Face dataset or local dataset folder, written `name`,
        `name:split` or `name:configuration:split`. The default split is `train`.

    Returns:
      One dict per row, by column name.

    Raises:
      ValueError: If the source is malformed or empty.
      OSError: If the source is missing or unreachable.
    """
    path = Path(source)
    is_file = path.suffix in _READERS
    folder = Path(source.split(":")[0])
    if (is_file and not path.is_file()) or (source.startswith(("/", "./", "../")) and not folder.exists()):
        raise FileNotFoundError(f"{source} does not exist; correct the path (relative paths start at {Path.cwd()}).")
    if path.is_file() and not is_file:
        raise ValueError(f"{source} must be a {' or '.join(_READERS)} file; convert it to one of these formats.")
    rows = _READERS[path.suffix](path) if is_file else _read_data_set(source)
    if not rows:
        raise ValueError(f"{source} contains no rows.")
    return rows


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} line {number} is not valid JSON: {error}.") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path} line {number} is not a JSON object; write one {{...}} per line.")
            rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"Failed to read {path} as Parquet: {error}") from None


def _read_data_set(source: str) -> list[dict[str, Any]]:
    # Importing datasets takes seconds and is not required for files.
    import datasets

    name, *configuration, split = source.split(":") if ":" in source else (source, "train")
    try:
        return datasets.load_dataset(name, *configuration, split=split).to_list()
    except OSError as error:
        raise OSError(
            f"The dataset {source!r} cannot be reached: {error}; check its name, or download it and set its path."
        ) from None
    except (ValueError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"The dataset {source!r} cannot be read: {error}; write name, name:split or name:configuration:split."
        ) from None


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def load_problems(
    source: str, problem_column: str = "problem", answer_column: str = "answer", id_column: str = "id"
) -> list[Problem]:
    """Reads problems from a file or dataset.

    Args:
      source: File or dataset, see `read_source`.
      problem_column: Column that contains the problem text.
      answer_column: Column that contains the answer.
      id_column: Column that contains the problem id. Rows without this column get the name of the source and their
        number, counted from 1, such as `gsm8k/17`.

    Returns:
      The problems. Their prompts are the problem texts.

    Raises:
      ValueError: If the source is malformed or empty, a row has no problem or no answer, or a problem is not text.
      OSError: If the source is missing or unreachable.
    """
    stem, problems = Path(source.split(":")[0]).stem, []
    for number, row in enumerate(read_source(source), start=1):
        for column in (problem_column, answer_column):
            if row.get(column) in (None, ""):
                raise ValueError(
                    f"Row {number} of {source} has no value in column {column!r}; its columns are {', '.join(row)}."
                )
        text, identifier = row[problem_column], row.get(id_column)
        if not isinstance(text, str):
            raise ValueError(
                f"Column {problem_column!r} in row {number} of {source} must be text, but is a {type(text).__name__}."
            )
        name = f"{stem}/{number}" if identifier is None else str(identifier)
        problems.append(Problem(id=name, prompt=text, answer=str(row[answer_column])))
    return problems


def clean_problems(problems: Sequence[Problem], held_out: Sequence[Problem] = ()) -> tuple[list[Problem], Dropped]:
    """Removes duplicate, conflicting and held-out problems.

    Problems are copies of each other if their prompts differ only in whitespace. The first copy is kept. If the answers
    of the copies differ in more than whitespace and dollar signs, the correct answer is unknown and all copies are
    removed.

    Args:
      problems: Problems to clean.
      held_out: Problems that must not appear in the result.

    Returns:
      The remaining problems in their original order, and the numbers of removed problems.

    Raises:
      ValueError: If two of the problems have the same id.
    """
    for identifier, count in collections.Counter(problem.id for problem in problems).most_common(1):
        if count > 1:
            raise ValueError(f"{count} problems have the id {identifier!r}; make the ids unique.")
    same: dict[str, list[Problem]] = {}
    for problem in problems:
        same.setdefault(_squeeze(problem.prompt), []).append(problem)
    agreed = {
        text: copies[0]
        for text, copies in same.items()
        if len({_squeeze(copy.answer.replace("$", "")) for copy in copies}) == 1
    }
    tested = {_squeeze(problem.prompt) for problem in held_out}
    kept = [problem for text, problem in agreed.items() if text not in tested]
    dropped = Dropped(
        duplicates=len(problems) - len(same), conflicting=len(same) - len(agreed), held_out=len(agreed) - len(kept)
    )
    return kept, dropped


def _squeeze(text: str) -> str:
    return "".join(text.split())
