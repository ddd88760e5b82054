"""Converts Arrow tables, of Parquet files and datasets, to rows of Python values."""

import contextlib
import re
from typing import Any


def table_rows(table: Any) -> list[dict[str, Any]]:
    """Returns the rows of a pyarrow table as dicts, with decoded and rounded values, see `problems.read_source`."""
    columns = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        columns[field.name] = column.to_pylist()
        if re.search("float|binary", str(field.type)):  # includes "halffloat" and nested types, but not "double"
            columns[field.name] = [_plain_value(value, field.type) for value in columns[field.name]]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _plain_value(value: Any, kind: Any) -> Any:
    """Decodes the text in a value of an Arrow type, and rounds its numbers to the fewest digits that identify them."""
    import pyarrow

    if pyarrow.types.is_floating(kind) and value is not None:
        return float(str(kind.to_pandas_dtype()(value)))
    if isinstance(value, dict):
        return {field.name: _plain_value(value[field.name], field.type) for field in kind}
    if pyarrow.types.is_map(kind) and value is not None:
        return [(_plain_value(key, kind.key_type), _plain_value(item, kind.item_type)) for key, item in value]
    if isinstance(value, list):
        return [_plain_value(item, kind.value_type) for item in value]
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    return value
