"""Tests of the doctor's command on one device and with two processes.

rollouts/test_sglang_training.py tests its check of servers with real ones.
"""

import json
import subprocess
import sys
from pathlib import Path

import halting
import pytest
from reserved_ports import reserve_port
from sglang_servers import ROOT
from training_runs import SETTINGS, as_flags, environment

pytestmark = pytest.mark.slow

PATIENT = """
import dataclasses, sys
from poly_epo_jax.doctor import __main__ as command, machine

command.TIMEOUT_SECONDS = machine.STAGE_SECONDS = 6000.0
command.CHECKS = tuple(dataclasses.replace(check, timeout_seconds=6000.0) for check in command.CHECKS)
sys.exit(command.main())
"""
"""Runs the command with long time limits, for busy machines."""


def start(folder: Path, *flags: str, **settings) -> subprocess.Popen[str]:
    folders = {
        "workdir": folder / "run",
        "base.cache_dir": folder / "base",
        "compilation_cache_dir": folder / "compiled",
    }
    command = [sys.executable, "-c", PATIENT, "--config=configs/polynomial.py", *flags]
    command += as_flags(SETTINGS | folders | {key.replace("__", "."): value for key, value in settings.items()})
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output = process.communicate(timeout=halting.SECONDS)[0]
        return process.returncode, output
    finally:
        process.kill()


def test_one_device(tmp_path):
    output = tmp_path / "runs" / "doctor.json"
    code, printed = end(start(tmp_path, f"--output={output}"))
    assert code == 0, printed
    found = {row["name"]: row for row in json.loads(output.read_text())}
    passed = ("devices", "settings", "kernel", "decoding", "checkpoint", "seconds of a step")
    skipped = ("collectives", "servers", "judge", "memory")
    statuses = {name: row["status"] for name, row in found.items()}
    assert statuses == dict.fromkeys(passed, "passed") | dict.fromkeys(skipped, "skipped")
    assert found["devices"]["message"].endswith("mesh data 1, fsdp 1, tensor 1")
    kernel = found["kernel"]["message"]  # It contains the resolved name of model.attention=auto.
    assert "blockwise" in kernel
    for name in ("values", "dq", "dk", "dv"):
        error, tolerance = (float(found["kernel"]["figures"][f"{kind} of {name}"]) for kind in ("error", "allowed"))
        assert error <= tolerance < 1e-3 and f"{name} {error:.1e}" in kernel and f"{tolerance:.1e}" in kernel
    # No files remain in the run folder or next to it.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compiled", "runs"]


def test_an_invalid_mesh(tmp_path):
    code, printed = end(start(tmp_path, "--short", mesh__tensor=3))
    assert code == 1 and "nearest" in printed and "mesh.tensor=3" in " ".join(printed.split())
    assert printed.splitlines()[-1].startswith("Error: failed: devices; "), printed


def test_two_processes(tmp_path):
    """Both processes check collectives and the checkpoint, and only the first one prints the table."""
    address = f"127.0.0.1:{reserve_port()}"
    hosts = {"hosts__coordinator_address": address, "hosts__num_processes": 2, "mesh__fsdp": 2}
    processes = [start(tmp_path, "--short", hosts__process_id=index, **hosts) for index in range(2)]
    (first_code, first), (second_code, second) = map(end, processes)
    assert (first_code, second_code) == (0, 0), first + second
    assert "Doctor: 5 passed, 0 failed, 2 skipped." in first and "2 x cpu on 2 hosts" in first
    assert "Doctor:" not in second
