"""Each attack of this folder for some seconds: the command runs, and everything holds."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# By hand: outages, which takes minutes to its first outcome.
NAMES = sorted({path.stem for path in HERE.glob("*.py")} - {"__main__", "outcome", "outages", "test_attack"})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_everything_holds(name: str):
    command = [sys.executable, str(HERE), name, "--minutes", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
