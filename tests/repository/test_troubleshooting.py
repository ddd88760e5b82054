"""Tests that the troubleshooting page quotes messages, metrics, keys and links that exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from poly_epo_jax.config.keys import Config
from poly_epo_jax.metrics.logged import LOGGED_METRICS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how_to" / "troubleshooting.md"
GAP = "\0"
"""Stands for the values that are inserted into a message."""

PLACEHOLDER = re.compile(r"'?\b[A-Z][A-Z_]*\b'?")
CODE = re.compile(r"`([^`\n]+)`")


def _text(node: ast.expr) -> str:
    """Returns the text of a string expression, with `GAP` for each value. Adjacent literals are one string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else GAP for part in node.values)
    return ""


def _strings() -> Iterator[str]:
    for file in sorted((ROOT / "poly_epo_jax").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                yield _text(node)
    for file in sorted((ROOT / "launch").glob("*.sh")):
        lines = file.read_text().replace("\\\n", "").splitlines()
        yield from (re.sub(r"\$\{?\w+(\[\*\])?\}?|\$\([^)]*\)", GAP, line) for line in lines)


@cache
def messages() -> list[str]:
    """Returns all strings of the package and the launch scripts that can be part of a message."""
    return [text for text in _strings() if " " in text]


def is_quoted(sentence: str) -> bool:
    """Returns True if one string contains the fixed fragments of a sentence, in order."""
    fragments = [part.strip(" .;:,()") for part in PLACEHOLDER.split(sentence)]
    pattern = re.compile(".*".join(re.escape(part) for part in fragments if len(part) > 3), re.DOTALL)
    return any(pattern.search(text) for text in messages())


def is_sentence(code: str) -> bool:
    """Returns True for quoted messages, as opposed to keys, values, commands and file names."""
    return code.count(" ") > 2 and not code.startswith(("bash ", "--config.task"))


def sentences() -> list[str]:
    return list(dict.fromkeys(code for code in CODE.findall(PAGE.read_text()) if is_sentence(code)))


@pytest.mark.parametrize("sentence", sentences())
def test_quoted_messages_exist(sentence: str):
    assert is_quoted(sentence), f"{sentence!r} is not printed; quote the current message"


def test_invented_and_rearranged_messages_are_detected():
    assert is_quoted("mesh.device_kind=KIND, but the available devices are FOUND")
    assert not is_quoted("mesh.device_kind=KIND, but the available GPUs are FOUND")
    assert is_quoted("URL failed the verification of an update to NAME: REASON.")
    assert not is_quoted("URL of an update to NAME failed the verification: REASON.")


def test_every_entry_is_headed_by_a_message():
    headings = re.findall(r"^### (.*)$", PAGE.read_text(), re.MULTILINE)
    assert 20 <= len(headings) == len(set(headings))
    assert all(re.fullmatch("`[^`]+`", heading) and is_sentence(heading.strip("`")) for heading in headings)


def test_metrics_and_keys_exist():
    text = PAGE.read_text()
    keys = {key for key, _, _ in Config().flat()}
    sections = {key.split(".")[0] for key in keys if "." in key}
    for code in CODE.findall(text):
        metric = re.fullmatch(r"[a-z_]+/[a-z_*]+", code)
        if metric:
            assert code in LOGGED_METRICS, code
        key = re.fullmatch(r"([a-z_]+)\.([a-z_]+)(?:=.*)?", code)
        if key and key[1] in sections and key[2] != "txt" and not is_sentence(code):
            assert f"{key[1]}.{key[2]}" in keys, code


def test_links_within_the_page_exist():
    text = PAGE.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\(#([^)]+)\)", text)) <= anchors
