"""JSON files: appended rows (.jsonl, one object per line) and atomically replaced files. Only requires Python.

Readers ignore a last line without a line break, because a crash may have interrupted its write.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

Row = dict[str, Any]
Columns = Mapping[str, type | UnionType]
"""Names and types of the columns that every row of a file must have."""


def read_rows(path: Path, columns: Columns) -> Iterator[Row]:
    """Iterates over the complete rows of a file.

    Args:
      path: The file. If it does not exist, there are no rows.
      columns: Columns that every row must have.

    Returns:
      An iterator over the rows.

    Raises:
      ValueError: If a complete line is not a JSON object with these columns.
    """
    return (row for _, row in _lines_and_rows(path, columns))


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows to a file. Within a row, `step` is written first, then the other keys in alphabetical order.

    Args:
      path: The file. It is created if it does not exist.
      rows: The rows. Floats are written with full precision. Values that are not finite are written as null, because
        JSON does not support them.

    Raises:
      OSError: If the rows cannot be written, as on a full disk. The file then has its previous content.
    """
    left = memoryview(b"".join(map(_to_line, rows)))
    with path.open("ab", buffering=0) as file:  # closing a file with a buffer would write the failed rows again
        size = file.tell()
        try:
            while left:
                left = left[file.write(left) :]
        except BaseException:
            with contextlib.suppress(OSError):  # the error of the write is raised
                file.truncate(size)  # otherwise, the next rows would continue an incomplete line
            raise


def keep_rows(path: Path, columns: Columns, keep: Callable[[Row], bool]) -> None:
    """Removes rows from a file. The bytes of the remaining rows do not change.

    Args:
      path: The file. An empty file is created if it does not exist.
      columns: Columns that every row must have.
      keep: Returns True for the rows to keep. An incomplete last line is also removed.

    Raises:
      ValueError: If a complete line is not a JSON object with these columns. The file is then unchanged.
    """
    replace_file(path, (line for line, row in _lines_and_rows(path, columns) if keep(row)))


def sort_rows(path: Path, columns: Columns, key: Callable[[Row], Any]) -> None:
    """Sorts the complete rows of a file. An incomplete last line is removed.

    Args:
      path: The file.
      columns: Columns that every row must have.
      key: Returns the sort key of a row.

    Raises:
      ValueError: If a complete line is not a JSON object with these columns. The file is then unchanged.
    """
    replace_file(path, (line for _, line in sorted([(key(row), line) for line, row in _lines_and_rows(path, columns)])))


def write_json(path: Path, content: Any) -> None:
    """Replaces a file atomically with indented JSON.

    Args:
      path: The file.
      content: Object that JSON can represent.
    """
    replace_file(path, [json.dumps(content, indent=2).encode(), b"\n"])


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Replaces a file atomically. If the process ends early, the file has either the old or the new content.

    The folder of the file is created if it does not exist.

    Args:
      path: The file.
      parts: New content, in consecutive parts.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # left behind by a killed process, or a link to another file
    with temporary.open("xb") as file:  # does not follow links
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Args:
      path: The file.
      advice: Remedy at the end of the error message.

    Returns:
      The object. Empty if the file does not exist.

    Raises:
      ValueError: If the file does not contain a JSON object.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON object ({error}); {advice}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object (it contains a {type(content).__name__}); {advice}.")
    return content


def _to_line(row: Mapping[str, Any]) -> bytes:
    names = sorted(row, key=lambda name: (name != "step", name))
    return json.dumps({name: _plain(row[name]) for name in names}, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value  # numpy scalars
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_and_rows(path: Path, columns: Columns) -> Iterator[tuple[bytes, Row]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
                if not all(isinstance(row[name], kind) for name, kind in columns.items()):
                    raise TypeError
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ValueError(f"{path}, line {number}, is not a row; fix or delete this line.") from None
            yield line, row
