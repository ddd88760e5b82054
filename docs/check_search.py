"""Checks that the search of the built site finds a metric, a key, a function and an error message."""

import html
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def error_message() -> str:
    """Returns the first error message of the troubleshooting page, whose messages are headings."""
    text = (ROOT / "docs" / "how_to" / "troubleshooting.md").read_text()
    found = re.search(r"^### `([^`]+)`", text, re.MULTILINE)
    if not found:
        sys.exit("Error: docs/how_to/troubleshooting.md contains no message as a heading.")
    return found[1]


def main() -> None:
    """Exits with an error message if the search index lacks one of the names."""
    index = json.loads((ROOT / "site" / "search" / "search_index.json").read_text())
    texts = [html.unescape(re.sub(r"<[^>]+>", "", f"{one['title']} {one['text']}")) for one in index["docs"]]
    text = " ".join(" ".join(texts).split())
    wanted = "policy/kl", "algo.set_size", "polychromic_advantages", error_message()
    if missing := [name for name in wanted if " ".join(name.split()) not in text]:
        sys.exit(f"Error: the search of the site does not find {', '.join(missing)}.")


if __name__ == "__main__":
    main()
