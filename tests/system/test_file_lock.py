"""One process at a time: a second one is told who holds the lock, and a lock dies with its holder."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from poly_epo_jax.records import run_folder
from poly_epo_jax.system.file_lock import InUseError, exclusive

ROOT = Path(__file__).parents[2]
HOLD = """
import sys
from pathlib import Path
from poly_epo_jax.system.file_lock import exclusive
with exclusive(Path(sys.argv[1]), "the folder", wait="wait" in sys.argv):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(lock: Path, *arguments: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLD, str(lock), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path):
    lock = tmp_path / "run" / run_folder.LOCK
    with holder(lock) as first:
        assert first.stdout and first.stdout.readline() == "held\n"
        sentence = rf"^the run folder {tmp_path}/run is in use by process {first.pid} on \S+; wait for it to end, "
        with pytest.raises(InUseError, match=sentence), run_folder.in_use(tmp_path / "run"):
            pass
        first.kill()
    with run_folder.in_use(tmp_path / "run"), pytest.raises(InUseError), exclusive(lock, "it"):
        pass


def test_one_that_waits_says_so_and_goes_on(tmp_path: Path):
    lock = tmp_path / "lock"
    with exclusive(lock, "it"):
        second = holder(lock, "wait")
        assert second.stderr and second.stderr.readline().endswith("; waiting for it to end.\n")
    assert second.stdout and second.stdout.readline() == "held\n"
    second.communicate("")


def test_a_disk_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    def flock(*arguments: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with exclusive(tmp_path / "lock", "it"):
        assert "is on a disk without locks; nothing keeps others out of it." in capsys.readouterr().err
