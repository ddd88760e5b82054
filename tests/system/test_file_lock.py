"""File locks: a second process is rejected with the name of the holder, and a lock is released with its holder."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from poly_epo_jax.records import run_folder
from poly_epo_jax.system.file_lock import InUseError, lock_file
from poly_epo_jax.system.output_folder import LOCK

ROOT = Path(__file__).parents[2]
HOLD = """
import sys
from pathlib import Path
from poly_epo_jax.system.file_lock import lock_file
with lock_file(Path(sys.argv[1]), "the folder", wait="wait" in sys.argv):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(lock: Path, *arguments: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLD, str(lock), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_second_process_is_rejected_until_the_first_is_killed(tmp_path: Path):
    lock = tmp_path / "run" / LOCK
    with holder(lock) as first:
        assert first.stdout and first.stdout.readline() == "held\n"
        message = rf"^the run {tmp_path}/run is in use by process {first.pid} on \S+;"
        with pytest.raises(InUseError, match=message), run_folder.lock_run_folder(tmp_path / "run"):
            pass
        first.kill()
    with run_folder.lock_run_folder(tmp_path / "run"), pytest.raises(InUseError), lock_file(lock, "it"):
        pass


def test_a_waiting_process_prints_a_message_and_continues(tmp_path: Path):
    lock = tmp_path / "lock"
    with lock_file(lock, "it"):
        second = holder(lock, "wait")
        assert second.stderr and second.stderr.readline().endswith("; waiting until it ends.\n")
    assert second.stdout and second.stdout.readline() == "held\n"
    second.communicate("")


def test_missing_lock_support_prints_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def flock(*arguments: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_file(tmp_path / "lock", "it"):
        assert capsys.readouterr().err.startswith(f"Warning: The file system of {tmp_path / 'lock'} ")
