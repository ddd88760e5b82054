"""Tests that the summaries of docs/explanation/claims.md and docs/reference/recipes.md are complete."""

import collections
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
STATUSES = {
    "reproduced": "reproduced",
    "partly reproduced": "partly reproduced",
    "contradicted": "contradicted or not observed",
    "not observed": "contradicted or not observed",
    "not run": "not run",
    "open question": "open question",
}
"""Rows of the summary in claims.md, by the beginning of a status in its table of claims."""


def test_the_summary_counts_the_statuses_of_the_claims():
    head, claims = (ROOT / "docs" / "explanation" / "claims.md").read_text().split("\n## Table of claims\n")
    claims = claims.split("\n## ")[0]
    summary = {name: int(count) for name, count in re.findall(r"^\| ([a-z ]+) \| (\d+) \|$", head, re.MULTILINE)}
    statuses = [row.split(" | ")[2] for row in claims.splitlines() if re.match(r"\| (abstract|§|appendix)", row)]
    counts = collections.Counter(
        name for status in statuses for start, name in STATUSES.items() if status.startswith(start)
    )
    assert summary == counts
    assert counts.total() == len(statuses) > 40


def test_each_recipe_and_study_is_listed():
    recipes, studies = (ROOT / "docs" / "reference" / "recipes.md").read_text().split("\n## Studies\n")
    for folder, text in (("configs", recipes), ("studies", studies)):
        listed = set(re.findall(r"^\| `(\w+)", text, re.MULTILINE))
        assert listed == {path.stem for path in (ROOT / folder).glob("*.py")}, folder
