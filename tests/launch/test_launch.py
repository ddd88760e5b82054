"""Tests of the launch scripts that do not require the target machines."""

import os
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


@pytest.mark.parametrize("nodes", [1, 2])
def test_slurm_installs_once_and_starts_every_node(tmp_path: Path, nodes: int):
    """The stand-ins of srun and of the setup scripts print their names and arguments."""
    for name, text in {
        "bin/srun": '#!/bin/sh\necho srun "$@"\n',
        "launch/setup_env.sh": 'echo trainer "$1"\n',
        "third_party/sglang/setup.sh": 'echo sglang "$1"\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bin" / "srun").chmod(0o755)
    ended = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch"), "--config=configs/polaris.py:h200x16"],
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
        | {"SLURM_NNODES": str(nodes)},
        capture_output=True,
        text=True,
    )
    words = "srun --kill-on-bad-exit=0 --label bash launch/node.sh --config=configs/polaris.py:h200x16"
    joined = " --config.hosts.coordinator_address=auto" if nodes > 1 else ""
    assert ended.stdout.splitlines() == ["sglang gpu", "trainer [gpu]", words + joined], ended.stderr
    assert ended.returncode == 0
