"""Tests that launch/accelerator.sh finds an interpreter with JAX, and adds missing packages without an index."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_launch import LAUNCH

SCRIPT = LAUNCH / "accelerator.sh"
# Any connection to an index would fail.
NO_INDEX = {"PIP_INDEX_URL": "http://127.0.0.1:1/", "PIP_EXTRA_INDEX_URL": "", "SMALL": "1"}


def write_wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def script(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | NO_INDEX | {"PYTHON": sys.executable} | variables
    return subprocess.run(["bash", SCRIPT, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_only_missing_packages_are_installed_without_an_index(tmp_path: Path):
    wheels, output = tmp_path / "wheels", tmp_path / "output"
    write_wheel(wheels, "surely_missing", "1.0")
    write_wheel(wheels, "numpy", "0.1")
    for _ in range(2):  # The second call finds the package.
        ended = script("--wheels", str(wheels), f"--output={output}", "--help")
        assert ended.returncode == 0 and "--stages" in ended.stdout, ended.stderr
        assert {path.name for path in (wheels / "packages").glob("*.py")} == {"surely_missing.py"}


def test_an_interpreter_without_jax_is_rejected(tmp_path: Path):
    without = tmp_path / "python"
    without.write_text("#!/bin/sh\nexit 1\n")
    without.chmod(0o755)
    ended = script(PYTHON=str(without))
    assert ended.returncode == 1 and "no Python with JAX was found" in ended.stderr
    assert not ended.stdout
