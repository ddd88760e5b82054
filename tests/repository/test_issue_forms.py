"""Tests that issue forms follow GitHub's form schema, and that the commands and paths in them exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from poly_epo_jax.doctor import __main__ as doctor
from poly_epo_jax.records import run_folder

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
ATTRIBUTES = {
    "markdown": {"value"},
    "textarea": {"label", "description", "placeholder", "value", "render"},
    "input": {"label", "description", "placeholder", "value"},
    "dropdown": {"label", "description", "multiple", "options", "default"},
    "checkboxes": {"label", "description", "options"},
}


def body(path: Path) -> list[dict[str, Any]]:
    return yaml.safe_load(path.read_text())["body"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_follow_the_schema_of_github(path: Path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "body", "labels", "title"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    for field in form["body"]:
        attributes = field["attributes"]
        assert field.keys() <= {"type", "id", "attributes", "validations"}
        assert attributes.keys() <= ATTRIBUTES[field["type"]]
        assert attributes["value" if field["type"] == "markdown" else "label"]
        assert field.get("validations", {}).keys() <= {"required"}
        if field["type"] in ("dropdown", "checkboxes"):
            options = attributes["options"]
            assert options and all(isinstance(one, str if field["type"] == "dropdown" else dict) for one in options)
    for names in ([field["id"] for field in fields], [field["attributes"]["label"] for field in fields]):
        assert names and len(set(names)) == len(names)
    assert all(re.fullmatch(r"[\w-]+", field["id"]) for field in fields)


def test_the_bug_form_requests_the_files_that_describe_a_run():
    fields = {field.get("id"): field["attributes"].get("description", "") for field in body(FORMS[0])}
    assert f"`{run_folder.ABOUT}`" in fields["about"]
    command = re.search(
        r"`python -m poly_epo_jax\.doctor --config=FILE --short --output=doctor\.json`", fields["doctor"]
    )
    assert command and all(flag in Path(doctor.__file__).read_text() for flag in ("--short", "--output"))


def test_paths_in_the_templates_exist():
    for path in (*GITHUB.rglob("*.yml"), *GITHUB.glob("*.md")):
        for name in re.findall(r"`(?:bash )?((?:docs|launch|tests)/[\w/.]+)`", path.read_text()):
            assert (ROOT / name).exists(), name
