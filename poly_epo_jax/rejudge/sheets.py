"""Cluster sheets: CSV files with a row per response, in which a person can read and correct the clusters of a judge.

Any spreadsheet program can edit a sheet. `--reference` reads the columns `problem`, `response` and `cluster` of a
corrected sheet. Texts of models are untrusted: a text that a spreadsheet would execute as a formula begins with '.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from poly_epo_jax.judges.exact import clusters_of
from poly_epo_jax.records.recorded_groups import RecordedGroup
from poly_epo_jax.system.json_files import Row, replace_file
from poly_epo_jax.system.text import printable
from poly_epo_jax.types import DEGENERATE_CLUSTER

SHEET = "clusters.csv"
COLUMNS = ("problem", "response", "cluster", "rationale", "text", "prompt")
# Places before formulas. Some programs also end a cell at a semicolon, a tab or a line break in a text.
_FORMULA = re.compile(r"""(^|[;\t\r\n])(?=[\s"']*[=+\-@\uff0b\uff0d\uff1d\uff20])|^(?=[\t\r])""")


def write_sheet(path: Path, groups: Sequence[RecordedGroup], rows: Mapping[str, Row]) -> None:
    """Writes a cluster sheet. An existing file, which a person may have corrected, is not changed.

    Args:
      path: The file.
      groups: All groups.
      rows: Rows of clusterings.jsonl by name of the group. The column `cluster` is empty where the judge failed.
    """
    if path.exists():
        return
    sheet = io.StringIO(newline="")
    writer = csv.writer(sheet)
    writer.writerow(COLUMNS)
    for group in groups:
        row, nothing = rows[group.name], [""] * len(group.responses)
        for number, (cluster, rationale, text) in enumerate(
            zip(row["clusters"] or nothing, row["rationales"] or nothing, group.responses, strict=True), start=1
        ):
            writer.writerow(
                [
                    _cell(group.name),
                    number,
                    cluster,
                    _cell(rationale),
                    _cell(text),
                    _cell(group.problem.prompt if number == 1 else ""),
                ]
            )
    replace_file(path, [sheet.getvalue().encode("utf-8-sig")])  # spreadsheets recognize UTF-8 by its signature


def read_sheet(path: Path, groups: Sequence[RecordedGroup]) -> dict[str, np.ndarray]:
    """Reads the clusters in a sheet.

    Args:
      path: The file, which requires the columns `problem`, `response` (number from 1) and `cluster`: any text that is
        equal for the responses of a cluster, or 100 for degenerate responses.
      groups: All groups. Rows of other problems are ignored.

    Returns:
      Cluster ids [N] by name of the group. Groups without a cluster for each response are left out.

    Raises:
      ValueError: If the file is not a sheet, or has two rows for a response, or no complete group.
      OSError: If the file cannot be read.
    """
    labels: dict[tuple[str, str], str] = {}
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            try:
                key, label = (row["problem"], row["response"].strip()), row["cluster"].strip()
            except (KeyError, AttributeError):
                raise ValueError(f"{path} must have the columns problem, response and cluster in each row.") from None
            if key in labels:
                raise ValueError(f"{path} has two rows for response {key[1]} to {key[0]!r}; delete one of them.")
            labels[key] = label
    found = {}
    for group in groups:
        of_group = [labels.get((_cell(group.name), str(number)), "") for number in range(1, len(group.responses) + 1)]
        if all(of_group):
            found[group.name] = clusters_of(
                [None if label == str(DEGENERATE_CLUSTER) else label for label in of_group]
            ).ids
    if not found:
        raise ValueError(
            f"{path} has no problem of the input with a cluster for each of its responses; use a sheet of this input."
        )
    return found


def _cell(text: str) -> str:
    """Returns a text that spreadsheets show unchanged, except for an apostrophe before formulas."""
    return _FORMULA.sub(r"\1'", printable(text))
