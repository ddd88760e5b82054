"""Tests that the files for contributors agree with the code: versions, Python versions, commands and paths."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from user_packages import PROJECT

ROOT = Path(__file__).parents[2]
ADDRESS = re.compile(r"https?://github\.com/[\w.-]+/poly_epo_jax\b")


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_versions_agree():
    version = PROJECT["version"]
    assert str(read("CITATION.cff")["version"]) == version
    released = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[:2] == ["Unreleased", version]


def test_all_files_have_the_same_address_of_the_repository():
    address = PROJECT["urls"]["Repository"]
    listed = subprocess.run(
        ["git", "grep", "-lI", "poly_epo_jax"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = {(name, link) for name in listed.stdout.split() for link in ADDRESS.findall((ROOT / name).read_text())}
    assert {name for name, link in found if link == address} >= {"pyproject.toml", "CITATION.cff", "README.md"}
    assert {name for name, link in found if link != address} == set()
    assert read("CITATION.cff")["repository-code"] == address


def test_one_command_replaces_the_owner_everywhere(tmp_path: Path):
    names = ("pyproject.toml", "CITATION.cff", "README.md", "launch/address.sh", "launch/help.sh")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    subprocess.run(["bash", "launch/address.sh", "octo-cat"], cwd=tmp_path, check=True)
    texts = {name: (tmp_path / name).read_text() for name in names}
    (address,) = {link for text in texts.values() for link in ADDRESS.findall(text)}
    assert address.split("/")[3] == "octo-cat"
    assert texts["launch/address.sh"] == (ROOT / "launch/address.sh").read_text()
    ended = subprocess.run(["bash", "launch/address.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2 and "GitHub account" in ended.stderr


def test_the_citation_names_software_and_paper():
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["license"] == PROJECT["license"]
    assert citation["title"].startswith("poly_epo_jax: ") and citation["authors"]
    (paper,) = citation["references"]
    assert paper["title"] == "Poly-EPO: Training Exploratory Reasoning Models" and paper["year"] == 2026
    assert paper["url"] == PROJECT["urls"]["Paper"]
    assert [author["family-names"] for author in paper["authors"]][:2] == ["Orney", "Ibn Hamid"]


def test_the_workflow_runs_ci_on_all_supported_python_versions():
    steps = read(".github/workflows/ci.yml")["jobs"]["test"]["steps"]
    (pythons,) = [step["with"]["python-version"].split() for step in steps if "setup-python" in step.get("uses", "")]
    lowest, highest = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    assert sorted(pythons) == [f"3.{minor}" for minor in range(int(lowest), int(highest))]
    (run,) = [step for step in steps if "run" in step]
    assert run["run"] == ".ci/run" and (ROOT / run["run"]).stat().st_mode & 0o111
    assert run["env"] == {"POLY_EPO_SHARED": ""}


def test_the_release_workflow_publishes_the_tested_files_by_hand_only():
    workflow = read(".github/workflows/release.yml")
    assert workflow[True] == {"workflow_dispatch": None}  # YAML reads the key `on` as a boolean
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert "bash launch/package.sh" in [step.get("run") for step in build["steps"]]
    assert publish["needs"] == "build" and "permissions" not in build
    (trusted,) = [step for step in publish["steps"] if step["uses"].startswith("pypa/gh-action-pypi-publish@")]
    assert publish["permissions"] == {"id-token": "write"} and "with" not in trusted


def test_ci_rejects_a_missing_data_folder():
    ended = subprocess.run([ROOT / ".ci/run"], env={"POLY_EPO_SHARED": "/nowhere"}, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "Error: POLY_EPO_SHARED=/nowhere is not a folder.\n"


@pytest.mark.parametrize("hook", read(".pre-commit-config.yaml")["repos"][0]["hooks"], ids=lambda hook: hook["id"])
def test_hooks_run_the_same_checks_as_launch_test(hook: dict[str, Any]):
    """Each hook runs the ruff of .venv with the checks of launch/test.sh, so it changes nothing after they pass."""
    program, *arguments = shlex.split(hook["entry"])
    assert program == ".venv/bin/ruff"
    name, flags = arguments[0], [flag for flag in arguments[1:] if flag != "--fix"]
    ended = subprocess.run(
        ["ruff", name, "--diff", *flags, "tests/repository/test_contributing.py"], cwd=ROOT, capture_output=True
    )
    assert ended.returncode == 0
    assert f"ruff {name}" in (ROOT / "launch/test.sh").read_text()


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "CHANGELOG.md"])
def test_linked_files_exist(document: str):
    text = (ROOT / document).read_text()
    links = [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    tests = re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert [name for name in [*links, *tests] if not (ROOT / name).exists()] == []
