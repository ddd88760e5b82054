"""Tests of the launch scripts that do not require the target machines."""

import os
import re
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.s[hb]*")), ids=lambda path: path.name)
def test_syntax_is_valid(script: Path):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.fixture
def tpu(tmp_path: Path):
    """Runs tpu.sh with a stand-in for gcloud that prints its arguments."""
    (tmp_path / "gcloud").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "gcloud").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ZONE": "a-zone"}

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(LAUNCH / "tpu.sh"), *arguments]
        return subprocess.run(command, env=os.environ | path | environment, capture_output=True, text=True)

    return run


def test_tpu_run_starts_the_same_command_on_all_hosts_with_the_flags_of_the_user(tpu):
    arguments = tpu("run", "--config=configs/polaris.py:v5p-32", "--config.workdir=/elsewhere").stdout.splitlines()
    assert "--worker=all" in arguments and "--zone=a-zone" in arguments
    (command,) = [line for line in arguments if line.startswith("--command=")]
    doctor, _, trainer = command.partition(" -m poly_epo_jax.doctor --short ")[2].partition(
        " && python -m poly_epo_jax.main "
    )
    assert doctor.split() == trainer.rstrip().split()
    words = command.split()
    assert words.index("--config=configs/polaris.py:v5p-32") < words.index("--config.hosts.coordinator_address=auto")
    assert words.index("--config.workdir=/mnt/shared/poly-epo") < words.index("--config.workdir=/elsewhere")


def test_tpu_reports_missing_arguments(tpu):
    assert "ZONE: is not set" in tpu("status", ZONE="").stderr
    assert "append --config=FILE" in tpu("run").stderr
    assert "append the slice type" in tpu("create").stderr
    usage = tpu("begin")
    assert usage.returncode == 2 and "bash launch/tpu.sh create v5p-32" in usage.stderr


@pytest.mark.parametrize("script", ["quickstart.sh", "smollm2.sh", "node.sh", "test.sh"])
def test_help_prints_the_description_without_installing(script: str, tmp_path: Path):
    for name in (script, "help.sh"):
        (tmp_path / name).write_text((LAUNCH / name).read_text())
    ended = subprocess.run(["bash", str(tmp_path / script), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert f"bash launch/{script}" in ended.stdout and not any(line.startswith(("#", "source")) for line in lines)
    comment = (LAUNCH / script).read_text().splitlines()
    assert lines[0] == comment[1].removeprefix("# ") and lines[-1] == comment[len(lines)].removeprefix("# ")


def test_an_unknown_argument_of_smollm2_is_an_error():
    ended = subprocess.run(["bash", str(LAUNCH / "smollm2.sh"), "--folder=x"], capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.startswith("Error: unknown argument --folder=x; ")


def test_a_quick_start_with_another_number_of_steps_has_separate_folders(tmp_path: Path):
    """In place of Python, a stand-in prints its arguments."""
    (tmp_path / "launch").mkdir()
    for name in ("quickstart.sh", "help.sh"):
        (tmp_path / "launch" / name).write_text((LAUNCH / name).read_text())
    (tmp_path / "launch" / "setup_env.sh").write_text('set -euo pipefail; python() { echo "$@"; }')

    def folders(*flags: str) -> list[str]:
        command = ["bash", "launch/quickstart.sh", *flags]
        printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        return re.findall(r"runs/\S+", printed)

    few = folders("--config.seed=1", "--config.train.num_steps=20")
    assert few == [f"{folder}-20-steps" for folder in folders("--config.seed=1")]
    assert folders()[:2] == ["runs/polynomial-poly_epo", "runs/polynomial-grpo"] == folders()[2:4]
    assert folders()[4] == "runs/report"
