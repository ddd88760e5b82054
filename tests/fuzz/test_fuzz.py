"""A short form of each attack in fuzz/: the command runs, and everything holds."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUZZ = ROOT / "fuzz"
# Run by hand: outages, which takes minutes until its first outcome.
ATTEMPTS = {"answers": 40, "corruption": 4, "kills": 2, "nan": 4, "replies": 150, "servers": 60, "settings": 120}


def test_every_attack_is_tried():
    assert {path.stem for path in FUZZ.glob("*.py")} - {"__main__", "outcome", "outages"} == {*ATTEMPTS}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attempts"), ATTEMPTS.items())
def test_everything_holds(name: str, attempts: int):
    command = [sys.executable, str(FUZZ), name, "--attempts", str(attempts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
