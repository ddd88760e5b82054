"""Reads datasets of the Hugging Face Hub, local dataset folders, and the rows of Arrow tables."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from poly_epo_jax.system.text import first_line

HUB_SECONDS = 10.0
"""Time in seconds after which the Hub counts as unreachable."""


def read_data_set(source: str) -> list[dict[str, Any]]:
    """Reads the rows of a dataset. If the Hub does not respond, a copy in the cache is used without retries.

    Args:
      source: Name, `name:split` or `name:configuration:split`. The default split is `train`.

    Returns:
      One dict per row, see `problems.read_source`.

    Raises:
      ValueError: If the dataset, configuration or split does not exist or cannot be read, or if the README.md of a
        folder selects files outside of it.
      OSError: If the dataset is unreachable.
    """
    import datasets  # takes seconds, and is not required for files

    name, *configuration, split = source.split(":") if ":" in source else (source, "train")
    is_offline, is_local = datasets.config.HF_HUB_OFFLINE, Path(name).exists()
    unreachable = "" if is_offline or is_local else _hub_error(name)
    # The client would repeat each request for half a minute, with a warning each time.
    datasets.config.HF_HUB_OFFLINE = is_offline or bool(unreachable)
    try:
        selected = datasets.load_dataset_builder(name, *configuration).config.data_files if is_local else {}
        for file in (one for of_split in selected.values() for one in of_split):
            if not Path(os.path.abspath(file)).is_relative_to(os.path.abspath(name)):
                raise ValueError(f"its README.md selects {file!r}, which is not in its folder")
        data_set: Any = datasets.load_dataset(name, *configuration, split=split)
    except OSError as error:
        raise OSError(
            f"The dataset {source!r} cannot be reached: "
            f"{unreachable or str(error).partition(' with any supported')[0]}; check its name, or download it and set "
            "its path."
        ) from None
    except Exception as error:  # The type of connection errors depends on the version of the client.
        raise ValueError(
            f"The dataset {source!r} cannot be read: {error}; write name, name:split or name:configuration:split."
        ) from None
    finally:
        datasets.config.HF_HUB_OFFLINE = is_offline
    return table_rows(data_set.with_format("arrow")[:])


def _hub_error(name: str) -> str:
    """Sends a single request to the Hub. Returns the error if the Hub does not respond."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(name, timeout=HUB_SECONDS)
    except (HfHubHTTPError, ValueError):  # such as the response that the dataset does not exist, or an invalid name
        return ""
    except Exception as error:  # The type of connection errors depends on the version of the client.
        return f"the Hugging Face Hub does not respond ({first_line(error)})"
    return ""


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
