"""Weights lie in a place where everyone may write, but in a folder that only their user can access."""

import os
import stat
from pathlib import Path

import pytest
from fakes import TINY, tiny_params

from poly_epo_jax.rollouts.servers.weight_sync import DiskSync


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


@pytest.mark.parametrize("how", ["link", "file", "another owner"])
def test_what_is_not_the_users_own_folder_is_left_alone(tmp_path: Path, monkeypatch, how: str):
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
        users = iter([os.geteuid(), 4242])  # as it is named, and as it is looked at
        monkeypatch.setattr(os, "geteuid", lambda: next(users))
    DiskSync(shared, "a run", TINY, "float32").close()
    assert path.exists() and (elsewhere / "kept").exists()


def test_a_folder_in_which_everyone_may_replace_it_is_refused(tmp_path: Path):
    sync = DiskSync(tmp_path, "a run", TINY, "float32")
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match=rf"everyone may replace folders there; chmod \+t {tmp_path}"):
        sync.prepare(tiny_params(), "1")
    tmp_path.chmod(0o1777)  # as /dev/shm
    sync.prepare(tiny_params(), "1")


def test_a_place_where_no_folder_can_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"No folder for weights can be made in .*; set rollouts.weights_dir"):
        DiskSync(tmp_path / "file" / "below", "a run", TINY, "float32").prepare(tiny_params(), "1")
