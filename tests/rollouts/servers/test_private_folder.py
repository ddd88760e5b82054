"""Tests the private folder to which `DiskSync` writes weights, in a directory that all users may write to."""

import os
import stat
from pathlib import Path

import pytest
from fakes import TINY, tiny_params

from poly_epo_jax.rollouts.servers.weight_sync import DiskSync


def test_the_folder_is_private_and_removed_with_the_run(tmp_path: Path):
    sync = DiskSync(tmp_path / "below", "a run", TINY, "float32")
    assert not (tmp_path / "below").exists()
    for version in ("1", "2"):
        sync.prepare(tiny_params(), version)
        sync.switch()
    (folder,) = (tmp_path / "below").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(one.name for one in folder.iterdir()) == ["1", "2"]
    # The next process of a run removes the folder that a killed process left behind.
    next_sync = DiskSync(tmp_path / "below", "a run", TINY, "float32")
    assert not folder.exists()
    next_sync.prepare(tiny_params(), "3")
    next_sync.close()
    assert list((tmp_path / "below").iterdir()) == []


@pytest.mark.parametrize("how", ["link", "file", "another owner"])
def test_links_files_and_folders_of_other_users_are_not_removed(tmp_path: Path, monkeypatch, how: str):
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("theirs")
    sync = DiskSync(shared, "a run", TINY, "float32")
    sync.prepare(tiny_params(), "1")
    (path,) = shared.iterdir()
    sync.close()
    if how == "link":
        path.symlink_to(elsewhere)
    elif how == "file":
        path.write_text("theirs")
    else:
        path.mkdir()
        users = iter([os.geteuid(), 4242])  # For the name of the folder, and for the comparison with its owner.
        monkeypatch.setattr(os, "geteuid", lambda: next(users))
    DiskSync(shared, "a run", TINY, "float32").close()
    assert path.exists() and (elsewhere / "kept").exists()


def test_a_parent_in_which_other_users_can_replace_the_folder_is_rejected(tmp_path: Path):
    sync = DiskSync(tmp_path, "a run", TINY, "float32")
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match=rf"chmod \+t {tmp_path}"):
        sync.prepare(tiny_params(), "1")
    tmp_path.chmod(0o1777)  # The mode of /dev/shm.
    sync.prepare(tiny_params(), "1")


def test_an_error_to_create_the_folder_names_its_parent(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"folder for weights in .*/file/below .* set rollouts.weights_dir"):
        DiskSync(tmp_path / "file" / "below", "a run", TINY, "float32").prepare(tiny_params(), "1")
