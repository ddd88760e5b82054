"""Weights lie in a place where everyone may write, but in a folder that only their user can access."""

import os
import re
import stat
from pathlib import Path

import pytest
from fakes import TINY, tiny_params

from poly_epo_jax.rollouts.sglang.private_folder import make_private, private_folder
from poly_epo_jax.rollouts.sglang.weight_sync import DiskSync

PLANTED = "was made by someone else, and weights are not written there; have it removed, or set rollouts.weights_dir"


def test_only_its_user_can_enter_it_and_it_goes_with_the_run(tmp_path: Path):
    sync = DiskSync(tmp_path / "below", "a run", TINY, "float32")
    assert not (tmp_path / "below").exists()
    for version in ("1", "2"):
        sync.prepare(tiny_params(), version)
        sync.switch()
    (folder,) = (tmp_path / "below").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(one.name for one in folder.iterdir()) == ["1", "2"]
    # If killed, it leaves them behind; the next process of the run removes them.
    next_sync = DiskSync(tmp_path / "below", "a run", TINY, "float32")
    assert not folder.exists()
    next_sync.prepare(tiny_params(), "3")
    next_sync.close()
    assert list((tmp_path / "below").iterdir()) == []


def test_another_user_or_run_has_another(tmp_path: Path, monkeypatch):
    mine = private_folder(tmp_path, "a run")
    assert mine != private_folder(tmp_path, "another")
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert mine != private_folder(tmp_path, "a run")


@pytest.mark.parametrize("when", ["before the start", "during the run"])
def test_a_planted_link_is_not_followed(tmp_path: Path, when: str):
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    for folder in (shared, elsewhere):
        folder.mkdir()
    (elsewhere / "kept").write_text("theirs")
    path = private_folder(shared, "a run")
    with pytest.raises(PermissionError, match=re.escape(PLANTED)):
        if when == "before the start":
            path.symlink_to(elsewhere)
        sync = DiskSync(shared, "a run", TINY, "float32")
        path.symlink_to(elsewhere)
        sync.prepare(tiny_params(), "1")
    assert [one.name for one in elsewhere.iterdir()] == ["kept"]


@pytest.mark.parametrize("how", ["a file", "others may write to it", "another owner"])
def test_what_is_not_the_users_own_folder_is_left_alone(tmp_path: Path, monkeypatch, how: str):
    path = private_folder(tmp_path, "a run")
    if how == "a file":
        path.write_text("theirs")
    else:
        path.mkdir()
        path.chmod(0o770 if how == "others may write to it" else 0o700)
    if how == "another owner":
        users = iter([os.geteuid(), 4242])  # as it is named, and as it is looked at
        monkeypatch.setattr(os, "geteuid", lambda: next(users))
    with pytest.raises(PermissionError, match=re.escape(f"{path} {PLANTED}")):
        private_folder(tmp_path, "a run")
    assert path.exists()


def test_a_folder_in_which_everyone_may_replace_it_is_refused(tmp_path: Path):
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match=rf"Everyone may replace folders in {tmp_path}; chmod \+t"):
        private_folder(tmp_path, "a run")
    tmp_path.chmod(0o1777)  # as /dev/shm
    make_private(private_folder(tmp_path, "a run"))


def test_a_place_where_no_folder_can_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"for weights cannot be made .*; set rollouts.weights_dir"):
        make_private(tmp_path / "file" / "below")
