"""Software versions of this process, of its repository, and of earlier starts of a run."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from poly_epo_jax.system.versions import PACKAGES, commit, versions, versions_used


def test_versions_are_the_installed_versions():
    found = versions()
    assert found["python"] == platform.python_version() and found["jax"] == jax.__version__
    assert set(found) == {"python", "commit", *PACKAGES} and all(found[name] for name in PACKAGES)


def test_a_commit_is_marked_if_files_differ_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert commit(tmp_path) == ""
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "somebody")
    file = tmp_path / "file"
    file.write_text("a")
    for command in (["init", "--quiet"], ["add", "file"], ["commit", "--quiet", "--message=first"], ["tag", "v1"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    clean = commit(tmp_path)
    assert len(clean) == 12 and set(clean) <= set("0123456789abcdef")
    file.write_text("b")
    assert commit(tmp_path) == f"{clean}+"


def test_versions_of_earlier_starts_are_kept_without_duplicates(tmp_path: Path):
    about, old, new = tmp_path / "about.json", {"jax": "1"}, {"jax": "2"}
    assert versions_used(about, old) == [old]
    about.write_text(json.dumps({"versions": [old]}))
    assert versions_used(about, old) == [old]
    assert versions_used(about, new) == [old, new]
    for corrupted in ("", "[]", '{"method": "GRPO"}'):
        about.write_text(corrupted)
        assert versions_used(about, new) == [new]


@pytest.mark.slow
def test_versions_are_read_without_importing_jax():
    code = "import sys; from poly_epo_jax.system.versions import versions; versions(); print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
