"""Digests of a folder: modified and missing files are named, and additional files are accepted. Digests of files."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from poly_epo_jax.system.digests import DIGESTS, check_digests, file_digests, option_digests, write_digests


def test_modified_and_missing_files_are_named(tmp_path: Path):
    (tmp_path / "a.bin").write_bytes(bytes(100))
    (tmp_path / "b.json").write_text("{}")
    check_digests(tmp_path)  # no digests yet
    write_digests(tmp_path)
    check_digests(tmp_path)
    (tmp_path / "more").write_text("added by a user")
    check_digests(tmp_path)

    (tmp_path / "a.bin").write_bytes(bytes(99) + b"\1")
    with pytest.raises(ValueError, match=rf"^{tmp_path} .*\(a\.bin\)"):
        check_digests(tmp_path)
    (tmp_path / "b.json").unlink()
    with pytest.raises(ValueError, match=r"\(a\.bin, b\.json\)"):
        check_digests(tmp_path)
    for text in ("[", "[" * 100_000):
        (tmp_path / DIGESTS).write_text(text)
        with pytest.raises(ValueError, match=rf"\({DIGESTS}\)"):
            check_digests(tmp_path)


def test_files_outside_of_the_folder_are_not_read(tmp_path: Path):
    (tmp_path / "elsewhere").touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / DIGESTS).write_text(json.dumps({"../elsewhere": hashlib.sha256().hexdigest()}))
    with pytest.raises(ValueError, match=r"\(\.\./elsewhere\)"):
        check_digests(folder)


def test_digests_of_large_files_are_cached_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    large, small = tmp_path / "large.bin", tmp_path / "small.bin"
    large.write_bytes(bytes(2**20))
    small.write_bytes(b"a")
    correct = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (large, small)]
    cache = tmp_path / "cache/poly_epo_jax" / DIGESTS
    assert file_digests([large, small]) == correct
    assert not cache.exists()  # the file was modified too recently

    os.utime(large, ns=(0, 10**18))
    assert file_digests([large, small]) == correct
    ((key, value),) = json.loads(cache.read_bytes()).items()
    assert value == correct[0]
    assert key.endswith(f"large.bin:{2**20}:{10**18}")

    cache.write_text(json.dumps({key: "cached"}))
    assert file_digests([large, small]) == ["cached", correct[1]]
    os.utime(large, ns=(0, 10**18 + 1))  # one nanosecond later
    assert file_digests([large]) == correct[:1]
    cache.write_text("[")  # a damaged cache is replaced
    assert file_digests([large]) == correct[:1]


def test_digests_are_computed_without_a_writable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "large.bin").write_bytes(bytes(2**20))
    os.utime(tmp_path / "large.bin", ns=(0, 10**18))
    assert file_digests([tmp_path / "large.bin"]) == [hashlib.sha256(bytes(2**20)).hexdigest()]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without a home directory
    monkeypatch.chdir(tmp_path)
    assert file_digests([tmp_path / "large.bin"]) == [hashlib.sha256(bytes(2**20)).hexdigest()]
    assert not (tmp_path / "~").exists()


def test_options_that_name_files_are_identified_by_content(tmp_path: Path):
    digests = {}
    for name in "abc":
        (tmp_path / name).write_text(name)
        digests[name] = hashlib.sha256(name.encode()).hexdigest()
    a, b, c = (str(tmp_path / name) for name in "abc")
    options = {"file": a, "files": (b, "", c), "folder": str(tmp_path), "text": "{problem}" * 1000, "number": 1}
    assert option_digests("task.options", options) == {
        "task.options.file": digests["a"],
        "task.options.files[0]": digests["b"],
        "task.options.files[2]": digests["c"],
    }
