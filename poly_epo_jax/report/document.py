"""One self-contained HTML page: it needs no network, no other file, and no script except its own.

Everything that comes from a run or a model is treated as text: it is escaped in the page and in the data for the page's
script, and the script only ever shows it as text. The page's Content-Security-Policy forbids everything else.
"""

import base64
import hashlib
import html
import importlib.resources
import json
import string
from collections.abc import Mapping, Sequence
from typing import Any


def document(title: str, body: str, data: Mapping[str, Any] | None = None) -> str:
    """The page's text.

    Args:
      title: plain text.
      body: HTML.
      data: the generations that the page's script shows, ready for JSON; None: the page has no script.
    """
    style, script, scripts = asset("report.css"), asset("browser.js"), ""
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}"
    if data is not None:
        policy += f"; script-src {_hash(script)}"
        # Only "<" could end a script element. It occurs only in strings, where \u003c means the same.
        content = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
        scripts = f'<script type="application/json" id="data">{content}</script>\n<script>{script}</script>'
    return string.Template(asset("page.html.template")).substitute(
        title=html.escape(title), policy=policy, style=style, body=body, scripts=scripts
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table that scrolls if it is wider than the screen. Cells are HTML; the first cell of a row is its heading."""
    lines = [f"<tr>{''.join(f'<th>{cell}</th>' for cell in header)}</tr>"]
    for first, *others in rows:
        lines.append(f"<tr><th>{first}</th>{''.join(f'<td>{cell}</td>' for cell in others)}</tr>")
    return f'<div class="wide"><table class="{kind}">{"".join(lines)}</table></div>'


def asset(name: str) -> str:
    """The text of a file in report/assets."""
    return importlib.resources.files("poly_epo_jax.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def markdown_table(header: Any, rows: Any) -> list[str]:
    """The lines of a table in Markdown."""
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in cells]
