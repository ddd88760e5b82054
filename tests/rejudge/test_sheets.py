"""Tests that no text of a cluster sheet becomes a formula, whichever character the program splits cells at."""

import csv
import re
from pathlib import Path

import pytest

from poly_epo_jax.records.recorded_groups import RecordedGroup
from poly_epo_jax.rejudge.sheets import read_sheet, write_sheet
from poly_epo_jax.types import Problem

FORMULA = "=cmd|' /C calc'!A0"
TEXTS = [
    *(f"{before}{FORMULA}" for before in ("", "a;", "a\t", "a\n", "a\r\n", "a; ", 'a;"', "\t", "\r", "a;b;")),
    *("+1", "-1", "@SUM(1)", "a;+1", "a\t-1", "a\n@SUM(1)", "\uff1d1+1", "a;\uff0b1"),
]
PLAIN = ["a = b", "x-1", "1; 2", "me@host", "a\nb", "$-1$"]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_no_cell_begins_like_a_formula(delimiter: str, tmp_path: Path):
    group = RecordedGroup(
        TEXTS[1], Problem("p", TEXTS[2], ""), tuple(TEXTS), (0.0,) * len(TEXTS), (False,) * len(TEXTS)
    )
    rows = {group.name: {"clusters": [0] * len(TEXTS), "rationales": TEXTS}}
    write_sheet(tmp_path / "sheet.csv", [group], rows)
    with (tmp_path / "sheet.csv").open(encoding="utf-8-sig", newline="") as file:
        cells = [cell for row in csv.reader(file, delimiter=delimiter) for cell in row]
    assert len(cells) > len(TEXTS)
    assert [cell for cell in cells if re.match(r"[\s\"]*[=+\-@\uff0b\uff0d\uff1d\uff20]", cell)] == []
    assert read_sheet(tmp_path / "sheet.csv", [group])[group.name].tolist() == [0] * len(TEXTS)


def test_other_texts_are_not_changed(tmp_path: Path):
    group = RecordedGroup("p", Problem("p", "", ""), tuple(PLAIN), (0.0,) * len(PLAIN), (False,) * len(PLAIN))
    write_sheet(tmp_path / "sheet.csv", [group], {"p": {"clusters": None, "rationales": None}})
    with (tmp_path / "sheet.csv").open(encoding="utf-8-sig", newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == PLAIN
