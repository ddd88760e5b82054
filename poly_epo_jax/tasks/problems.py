"""Problems with verifiable answers: reads them from files or data sets, cleans them, and puts them in order."""

import collections
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from poly_epo_jax.types import Problem


@dataclasses.dataclass(frozen=True)
class Dropped:
    """How many problems were dropped, and why: `duplicates` of the rows, `conflicting` and `held_out` of the rest."""

    duplicates: int = 0
    conflicting: int = 0
    held_out: int = 0


@runtime_checkable
class Cleaned(Protocol):
    """A task that left problems out and counts them by part (train, held_out)."""

    dropped: dict[str, Dropped]


def read_rows(source: str) -> list[dict[str, Any]]:
    """The rows of a `.jsonl` file, a `.parquet` file, or else a Hugging Face data set or a local folder of one.

    The last two are written `name`, `name:split` or `name:configuration:split`; the split is `train` if none is named.

    Raises:
      ValueError, OSError: the source is missing, unreachable, malformed or empty; the message names it.
    """
    path = Path(source)
    is_file = path.suffix in _READERS
    folder = Path(source.split(":")[0])
    if (is_file and not path.is_file()) or (source.startswith(("/", "./", "../")) and not folder.exists()):
        raise FileNotFoundError(f"There is no {source}; correct the path, which is taken from {Path.cwd()}.")
    if path.is_file() and not is_file:
        raise ValueError(f"{source} is neither {' nor '.join(_READERS)}; convert it to one of them.")
    rows = _READERS[path.suffix](path) if is_file else _read_data_set(source)
    if not rows:
        raise ValueError(f"{source} holds no rows.")
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
                raise ValueError(f"{path} line {number} is not JSON: {error}.") from None
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
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from None


def _read_data_set(source: str) -> list[dict[str, Any]]:
    # Imported here because it takes seconds, and files do not need it.
    import datasets

    name, *configuration, split = source.split(":") if ":" in source else (source, "train")
    try:
        return datasets.load_dataset(name, *configuration, split=split).to_list()
    except OSError as error:
        raise OSError(
            f"The data set {source!r} cannot be reached: {error}; check its name, or download it and give its path."
        ) from None
    except (ValueError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"The data set {source!r} cannot be read: {error}; write name, name:split or name:configuration:split."
        ) from None


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def load_problems(
    source: str, problem_column: str = "problem", answer_column: str = "answer", id_column: str = "id"
) -> list[Problem]:
    """The source's rows as problems whose prompt is the bare problem text.

    A row without `id_column` is named after its source and its number, counted from 1: `gsm8k/17`.

    Raises:
      ValueError, OSError: as for `read_rows`; a row lacks a column, or its problem is not text.
    """
    stem, problems = Path(source.split(":")[0]).stem, []
    for number, row in enumerate(read_rows(source), start=1):
        for column in (problem_column, answer_column):
            if row.get(column) in (None, ""):
                raise ValueError(
                    f"Row {number} of {source} has nothing in column {column!r}; its columns are {', '.join(row)}."
                )
        text, identifier = row[problem_column], row.get(id_column)
        if not isinstance(text, str):
            raise ValueError(
                f"Row {number} of {source} has a {type(text).__name__} in column {problem_column!r}; it must be text."
            )
        name = f"{stem}/{number}" if identifier is None else str(identifier)
        problems.append(Problem(id=name, prompt=text, answer=str(row[answer_column])))
    return problems


def clean_problems(problems: Sequence[Problem], held_out: Sequence[Problem] = ()) -> tuple[list[Problem], Dropped]:
    """Keeps the first copy of every problem, unless its answers conflict or it is among the held-out problems.

    Problems are the same if their prompts differ only in whitespace. Their answers conflict if they differ in more than
    whitespace and dollar signs; it is then unknown which answer is right, and no copy is kept.

    Raises:
      ValueError: two of the problems have the same id.
    """
    for identifier, count in collections.Counter(problem.id for problem in problems).most_common(1):
        if count > 1:
            raise ValueError(f"{count} problems have the id {identifier!r}; make ids unique.")
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
