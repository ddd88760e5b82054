"""Builds self-contained HTML pages, which load no external resources.

Texts of runs and models are untrusted. They are escaped in the page and in the data of its script, which inserts them
as text only. The Content-Security-Policy of the page blocks all other scripts, styles and requests.
"""

import base64
import hashlib
import html
import importlib.resources
import json
import string
from collections.abc import Mapping, Sequence
from typing import Any

from poly_epo_jax.metrics.intervals import interval_text

# Beginning of the Content-Security-Policy, which identifies the pages of this package.
POLICY = "default-src 'none'; img-src data:; style-src 'sha256-"


def document(title: str, body: str, data: Mapping[str, Any] | None = None) -> bytes:
    """Returns a page as UTF-8. Lone surrogates become question marks.

    Args:
      title: Title of the page, as plain text.
      body: Content of the page, as HTML.
      data: JSON-serializable data of the browser of generations. If None, the page has no script.
    """
    style, script, scripts = asset("report.css"), asset("browser.js"), ""
    policy = f"{POLICY}{_hash(style)}'"
    if data is not None:
        policy += f"; script-src 'sha256-{_hash(script)}'"
        # "<" could end the script element. In JSON it only occurs in strings, where \u003c is equivalent.
        content = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
        scripts = f'<script type="application/json" id="data">{content}</script>\n<script>{script}</script>'
    return (
        string.Template(asset("page.html.template"))
        .substitute(title=html.escape(title), policy=policy, style=style, body=body, scripts=scripts)
        .encode(errors="replace")
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Returns an HTML table that scrolls horizontally if it is wider than the screen.

    Args:
      header: Column headings, as HTML.
      rows: Cells of each row, as HTML. The first cell of a row is its heading.
      kind: CSS class of the table.
    """
    lines = [
        f"<tr>{''.join(f'<th>{cell}</th>' for cell in header)}</tr>",
        *(f"<tr><th>{first}</th>{''.join(f'<td>{cell}</td>' for cell in others)}</tr>" for first, *others in rows),
    ]
    return f'<div class="wide"><table class="{kind}">{"".join(lines)}</table></div>'


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns an HTML table of plain texts.

    Args:
      header: Column headings.
      rows: Cells of each row.
    """
    return table([*map(html.escape, header)], [[*map(html.escape, row)] for row in rows])


def interval_cell(value: Mapping[str, Any] | None, digits: int = 3) -> str:
    """Returns a table cell with a mean and, below it, its interval.

    Args:
      value: Entry of a metric in results.json, or None if there is no value.
      digits: Number of decimals.
    """
    mean, _, bounds = interval_text(value, digits).partition(" ")
    return f"{mean}<span class='interval'>{bounds}</span>" if bounds else mean


def asset(name: str) -> str:
    """Returns the text of a file in report/assets."""
    return importlib.resources.files("poly_epo_jax.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def markdown_table(header: Any, rows: Any) -> list[str]:
    """Returns the lines of a Markdown table.

    Args:
      header: Column headings.
      rows: Cells of each row. Cells are converted to strings.
    """
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in row) + " |" for row in cells]
