"""Reads the files in the documents. FILES maps the names in the first lines of docs/how_to/extend.md to contents."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def files_on(page: str) -> dict[str, str]:
    """Returns the contents of the files on a page of docs/, by the names in their first lines."""
    return dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL))


FILES = files_on("how_to/extend.md")
