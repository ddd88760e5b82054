"""JSON on disk: files of rows, one object per line, and files that are replaced whole. Needs only Python.

A row counts once its line is complete, so a line that a crash cut short is not a row.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

Row = dict[str, Any]
Columns = Mapping[str, type | UnionType]
"""The columns of every row of a file, and the type of each."""


def read_rows(path: Path, columns: Columns) -> Iterator[Row]:
    """The complete rows of a file, one at a time; none if the file does not exist.

    Raises:
      ValueError: a complete line is not a JSON object, or lacks one of the columns.
    """
    return (row for _, row in _lines_and_rows(path, columns))


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Adds rows to the end of a file, created if missing: `step` comes first, the other keys in alphabetical order.

    Floats are written in full; null stands for a number that is not finite, as JSON has no NaN.
    """
    with path.open("ab") as file:
        file.writelines(map(_to_line, rows))


def keep_rows(path: Path, columns: Columns, keep: Callable[[Row], bool]) -> None:
    """Keeps only the complete rows for which `keep` is true, byte for byte; makes an empty file if there is none yet.

    Raises:
      ValueError: as for `read_rows`; the file is then unchanged.
    """
    replace_file(path, (line for line, row in _lines_and_rows(path, columns) if keep(row)))


def sort_rows(path: Path, columns: Columns, key: Callable[[Row], Any]) -> None:
    """Sorts the complete rows of a file by `key`.

    Raises:
      ValueError: as for `read_rows`; the file is then unchanged.
    """
    keyed = [(key(row), line) for line, row in _lines_and_rows(path, columns)]
    replace_file(path, (line for _, line in sorted(keyed)))


def write_json(path: Path, content: Any) -> None:
    """Replaces a file with indented JSON."""
    replace_file(path, [json.dumps(content, indent=2).encode(), b"\n"])


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Replaces a file atomically: however the process ends, the file holds the old content or the new."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist.

    Raises:
      ValueError: it holds something else; the message ends with the advice.
    """
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a JSON object ({error}); {advice}.") from error


def _to_line(row: Mapping[str, Any]) -> bytes:
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}  # numpy scalars
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in plain.items()
    }
    ordered = {name: finite[name] for name in sorted(finite, key=lambda name: (name != "step", name))}
    return json.dumps(ordered, allow_nan=False).encode() + b"\n"


def _lines_and_rows(path: Path, columns: Columns) -> Iterator[tuple[bytes, Row]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            row = _row(line, columns)
            if row is None:
                raise ValueError(f"{path}, line {number}, is not a row: mend or delete that line.")
            yield line, row


def _row(line: bytes, columns: Columns) -> Row | None:
    try:
        row = json.loads(line)
        whole = all(isinstance(row[name], kind) for name, kind in columns.items())
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return row if whole else None
