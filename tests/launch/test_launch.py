"""The launch scripts, as far as they can be tested without the machines that they launch on."""

import os
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.s[hb]*")), ids=lambda path: path.name)
def test_bash_can_read_it(script: Path):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.fixture
def tpu(tmp_path: Path):
    """tpu.sh with a gcloud that only says what it was told."""
    (tmp_path / "gcloud").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "gcloud").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ZONE": "a-zone"}

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(LAUNCH / "tpu.sh"), *arguments]
        return subprocess.run(command, env=os.environ | path | environment, capture_output=True, text=True)

    return run


def test_a_tpu_run_starts_the_same_command_on_all_hosts_and_your_flags_count(tpu):
    told = tpu("run", "--config=configs/polaris.py:v5p-32", "--config.workdir=/elsewhere").stdout.splitlines()
    assert "--worker=all" in told and "--zone=a-zone" in told
    (command,) = [line for line in told if line.startswith("--command=")]
    doctor, _, trainer = command.partition(" -m poly_epo_jax.doctor --short ")[2].partition(
        " && python -m poly_epo_jax.main "
    )
    assert doctor.split() == trainer.rstrip().split()
    words = command.split()
    assert words.index("--config=configs/polaris.py:v5p-32") < words.index("--config.hosts.coordinator=auto")
    assert words.index("--config.workdir=/mnt/shared/poly-epo") < words.index("--config.workdir=/elsewhere")


def test_tpu_says_what_is_missing(tpu):
    assert "name the zone of the slice" in tpu("status", ZONE="").stderr
    assert "give --config=FILE first" in tpu("run").stderr
    assert "name the slice" in tpu("create").stderr
    usage = tpu("begin")
    assert usage.returncode == 2 and "bash launch/tpu.sh create v5p-32" in usage.stderr
