"""Tests that the documentation agrees with the code: generated pages, index, navigation, and files of a run folder."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from poly_epo_jax.evaluate import folder as evaluation
from poly_epo_jax.metrics.logged import LOGGED_METRICS
from poly_epo_jax.records import run_folder
from poly_epo_jax.study import folder as study

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = ["commands.md", "configuration.md", "metrics.md", "api/set_rl.md"]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert list(module.PAGES) == GENERATED
    return module


@pytest.mark.parametrize("page", [pytest.param("commands.md", marks=pytest.mark.slow), *GENERATED[1:]])
def test_generated_pages_agree_with_the_code(page: str, generate: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "40")  # the pages do not depend on the terminal
    assert (DOCS / "reference" / page).read_text() == generate.PAGES[page](), "run python docs/generate.py"


def pages_in(navigation: Any) -> list[str]:
    if isinstance(navigation, str):
        return [navigation]
    inner = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for one in inner for page in pages_in(one)]


def test_index_and_navigation_contain_every_page():
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {"images/README.md"}
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(pages_in(site["nav"])) == sorted({*pages, *pages_in(site["nav"])})
    api = {page for page in pages if page.startswith("reference/api/")} - {"reference/api/README.md"}
    linked = re.findall(r"\]\(([^)]+\.md)\)", (DOCS / "README.md").read_text())
    assert sorted(linked) == sorted({*linked, *(pages - api - {"README.md"})})
    listed = set(re.findall(r"\]\(([^)]+\.md)\)", (DOCS / "reference" / "api" / "README.md").read_text()))
    assert {Path(page).name for page in api} <= listed


def test_links_stay_inside_the_documentation():
    """Pages of the site cannot link to other files of the repository."""
    outside = [
        f"{page.relative_to(DOCS)}: {target}"
        for page in DOCS.rglob("*.md")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).resolve().is_relative_to(DOCS)
    ]
    assert outside == []


@pytest.mark.parametrize(
    "heading, folder, columns",
    [
        ("Run", run_folder, run_folder.LOGGED_GENERATION),
        ("Evaluation", evaluation, evaluation.EVALUATED_GENERATION),
        ("Study", study, study.ATTEMPT),
    ],
    ids=["run", "evaluation", "study"],
)
def test_files_and_columns_of_a_folder_are_documented(heading: str, folder: ModuleType, columns: dict[str, Any]):
    text = (DOCS / "reference" / "run_folder.md").read_text()
    (section,) = re.findall(rf"^## {heading}\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    files = {value for name, value in vars(folder).items() if name.isupper() and isinstance(value, str)}
    # A run of a study has a log, which is documented in the section of the run.
    documented = set(re.findall(r"^\| `([\w./-]+?)/?`", section, re.MULTILINE)) | {study.LOG}
    assert files - documented == set()
    assert columns.keys() - set(re.findall(r"`(\w+)`", text)) == set()


def test_texts_to_watch_for_name_existing_keys_and_metrics(generate: ModuleType):
    known = {key for key, _, _ in generate.Config().flat()} | LOGGED_METRICS.keys()
    named = [name for metric in LOGGED_METRICS.values() for name in re.findall(r"`([^`]+)`", metric.watch_for)]
    named = [name for name in named if re.search("[./]", name)]
    assert len(named) > 10
    assert [name for name in named if name not in known] == []
