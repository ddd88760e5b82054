"""Runs a few attempts of each test in fuzz/."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from poly_epo_jax.config.keys import Config

ROOT = Path(__file__).parents[2]
FUZZ = ROOT / "fuzz"
# outages is run manually, because its first outcome takes minutes.
ATTEMPTS = {"answers": 40, "corruption": 4, "kills": 2, "nan": 4, "replies": 150, "servers": 60, "settings": 64}


def test_all_fuzz_tests_are_run():
    assert {path.stem for path in FUZZ.glob("*.py")} - {"__main__", "outcome", "outages"} == {*ATTEMPTS}


def test_settings_has_a_valid_value_of_each_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FUZZ))
    import settings  # pyright: ignore[reportMissingImports]

    for key, field, _ in Config().flat():
        if not key.endswith("options"):
            settings.valid_value(random.Random(0), key, field)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attempts"), ATTEMPTS.items())
def test_no_attempt_fails(name: str, attempts: int):
    command = [sys.executable, str(FUZZ), name, "--attempts", str(attempts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
