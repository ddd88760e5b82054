"""Tests of the launch scripts that do not require the target machines."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from fakes import PATIENCE

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


def test_the_runtime_depends_on_the_type_of_the_slice(tpu):
    for kind, name, runtime in (
        ("v4-8", "v4-8", "tpu-ubuntu2204-base"),
        ("v5e-16", "v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v5p-32", "v5p-32", "v2-alpha-tpuv5"),
        ("v6e-16", "v6e-16", "v2-alpha-tpuv6e"),
    ):
        arguments = tpu("create", kind).stdout.splitlines()
        assert f"--accelerator-type={name}" in arguments and f"--runtime-version={runtime}" in arguments
    assert "--runtime-version=another" in tpu("create", "v6e-16", RUNTIME="another").stdout
    assert "RUNTIME: is not set" in tpu("create", "tpu7x-8", RUNTIME="").stderr


# gcloud with a single host, whose home is the folder $HOST. pgrep finds no processes of other users of this machine.
GCLOUD = """#!/bin/bash
case $4 in
  scp) cp "$5" "$HOST" ;;
  ssh) [[ $* == *--worker=all* && ${!#} == --command=* ]] && cd "$HOST" && exec bash -c "${!#:10}" ;;
esac
"""
PYTHON = """#!/bin/bash
echo python "$@"
[ ! -e sick ]
"""


@pytest.fixture
def slice_of_one(tmp_path: Path):
    """Creates a repository with tpu.sh, and returns the folders of the repository and of the host, and a run of it."""
    repository, host = tmp_path / "repository", tmp_path / "host"
    stand_ins = {
        "bin/gcloud": GCLOUD,
        "bin/pgrep": "#!/bin/sh\nexit 1\n",
        "bin/python": PYTHON,
        "bin/python3.12": "",
        "host/poly_epo_jax/.venv/bin/activate": "",
        "repository/launch/tpu.sh": (LAUNCH / "tpu.sh").read_text(),
        "repository/.gitignore": "/runs/\n",
        "repository/tracked.py": "tracked",
        "repository/deleted.py": "deleted later",
    }
    for name, text in stand_ins.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for script in (tmp_path / "bin").iterdir():
        script.chmod(0o755)
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *command], cwd=repository, check=True)

    def run(*arguments: str, action: str = "run", **variables: str) -> subprocess.CompletedProcess[str]:
        path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "ZONE": "a-zone", "HOST": str(host)}
        command = ["bash", str(repository / "launch" / "tpu.sh"), action, *arguments]
        return subprocess.run(command, env=os.environ | path | variables, capture_output=True, text=True)

    return repository, host, run


def test_tpu_run_copies_local_edits_and_starts_a_detached_run(slice_of_one):
    repository, host, run = slice_of_one
    (repository / "tracked.py").write_text("edited")
    (repository / "new file.py").write_text("new")
    (repository / "runs").mkdir()
    (repository / "runs" / "ignored").touch()
    ended = run("--config=configs/polaris.py:v5p-32", "--config.workdir=/else where", JUDGE_URL="http://judge:30010")
    assert ended.returncode == 0 and "bash launch/tpu.sh log" in ended.stdout, ended.stderr
    (doctor,) = [line for line in ended.stdout.splitlines() if "poly_epo_jax.doctor" in line]
    deadline = time.monotonic() + PATIENCE
    while not (log := (host / "poly_epo_jax.log")).exists() or not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (trainer,) = log.read_text().splitlines()
    flags = doctor.removeprefix("python -m poly_epo_jax.doctor --short ")
    assert trainer == f"python -m poly_epo_jax.main {flags}"
    words = flags.split(" ")
    assert words[0] == "--config=configs/polaris.py:v5p-32"
    assert {"--config.hosts.coordinator_address=auto", "--config.judge.url=http://judge:30010"} <= set(words)
    assert "--config.rollouts.name=embedded" in words
    assert words.index("--config.workdir=/mnt/shared/poly-epo") < words.index("--config.workdir=/else")

    copied = host / "poly_epo_jax"
    assert (copied / "tracked.py").read_text() == "edited" and (copied / "new file.py").read_text() == "new"
    assert (copied / "deleted.py").exists() and not (copied / "runs").exists()
    (repository / "deleted.py").unlink()
    assert run("--config=configs/polynomial.py").returncode == 0
    assert not (copied / "deleted.py").exists() and (copied / "tracked.py").exists()


def test_tpu_run_prepares_the_hosts_first(slice_of_one):
    _, host, run = slice_of_one
    flags = "--config=configs/polaris.py:v5p-32"
    assert run(flags, PREPARE="touch prepared && ! [ -e poly_epo_jax.tar.gz ]").returncode == 0
    assert (host / "prepared").exists()
    failed = run(flags, PREPARE="echo no mount >&2; false")
    assert failed.returncode == 1 and "no mount" in failed.stderr and "doctor" not in failed.stdout


@pytest.mark.parametrize("installed", ["python3.12", "python3"])
def test_tpu_setup_installs_python_if_the_host_has_no_supported_version(slice_of_one, tmp_path: Path, installed: str):
    repository, _, run = slice_of_one
    (tmp_path / "bin" / "python3.12").unlink()
    for name in ("bash", "cp", "git", "gzip", "mkdir", "mktemp", "rm", "tar", "touch", "xargs", "dirname"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    for name in (installed, "uv"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/bash\necho {name} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    (repository / "launch" / "help.sh").touch()
    (repository / "launch" / "setup_env.sh").write_text("echo setup $1\n")
    ended = run(action="setup", PATH=str(tmp_path / "bin"))
    *steps, last = ended.stdout.splitlines()
    found = [str(tmp_path / "bin" / "python3.12")]
    assert steps == (found if installed == "python3.12" else ["python3 -m pip install uv", "uv python install 3.12"])
    assert last == "setup [tpu]", ended.stderr


def test_tpu_run_does_not_train_if_the_doctor_fails(slice_of_one):
    repository, host, run = slice_of_one
    (repository / "sick").touch()
    ended = run("--config=configs/polaris.py:v5p-32")
    # An empty address is rejected for judges that are servers.
    assert ended.returncode == 1 and "--config.judge.url= " in ended.stdout
    assert not (host / "poly_epo_jax.log").exists()


# A slice with its state in the file `state`. `list` prints nothing before it is created. A new slice has an empty disk.
PREEMPTIBLE = """#!/bin/bash
cd "$HOST/.."
[[ $4 == ss[h] || $4 == scp ]] || echo "$4 $*" >>calls
case $4 in
  list) cat state 2>/dev/null || true ;;
  create) echo ACTIVE >state && find host -mindepth 1 -delete && touch ended ;;
  delete) [[ $* == *--quiet* ]] && rm state && touch ended ;; # without the flag, it asks a question
  *) exec bash bin/host_of_gcloud "$@" ;;
esac
"""
# The first run is preempted with its slice, the second is saved before a reboot, and the third ends.
TRAINER = """#!/bin/bash
cd "$HOST/.."
[[ $* != *poly_epo_jax.doctor* ]] || { rm -f ended && exit; }
echo "main ${*:3}" >>calls
case $(grep -c ^main calls) in
  1) echo SUSPENDED >state ;;
  2) echo "SIGTERM: Saved after step 3. Rerun the command to resume." ;;
  *) echo "$LAST" ;;
esac
touch ended
"""


@pytest.mark.parametrize(("last", "code"), [("Done: a run", 0), ("ConfigError: a reason", 1)])
def test_tpu_keep_resumes_a_run_until_it_has_ended(slice_of_one, tmp_path: Path, last: str, code: int):
    run = slice_of_one[-1]
    scripts = {
        "bin/host_of_gcloud": GCLOUD.replace("--worker=all*", "*"),
        "bin/gcloud": PREEMPTIBLE,
        "bin/python": TRAINER,
        "bin/sleep": '#!/bin/bash\nuntil [ -e "$HOST/../ended" ]; do /bin/sleep 0.01; done\n',
        "repository/launch/help.sh": "",
        "repository/launch/setup_env.sh": "mkdir -p .venv/bin && >.venv/bin/activate && echo setup >>$HOST/../calls\n",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    ended = run("v5p-32", "--config=configs/polaris.py:v5p-32", action="keep", LAST=last, SPOT="1")
    assert ended.returncode == code and ended.stdout.splitlines()[-1] == last, ended.stderr
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if not line.startswith("list")]
    assert [line.split()[0] for line in calls] == [
        "create",
        "setup",
        "main",
        "delete",
        "create",
        "setup",
        "main",
        "main",
    ]
    assert "--accelerator-type=v5p-32" in calls[0] and calls[0].endswith("--spot") and calls[0] == calls[4]
    trainers = {line for line in calls if line.startswith("main")}
    assert len(trainers) == 1 and "--config.workdir=/mnt/shared/poly-epo" in trainers.pop()


def test_tpu_reports_missing_arguments(tpu):
    assert "ZONE: is not set" in tpu("status", ZONE="").stderr
    assert "append --config=FILE" in tpu("run").stderr
    assert "append the slice type" in tpu("create").stderr
    usage = tpu("begin")
    assert usage.returncode == 2 and "bash launch/tpu.sh create v5p-32" in usage.stderr


@pytest.mark.parametrize(("nodes", "server"), [(1, "sglang"), (2, "sglang"), (2, "vllm")])
def test_slurm_installs_once_and_starts_every_node(tmp_path: Path, nodes: int, server: str):
    """The stand-ins of srun and of the setup scripts print their names and arguments."""
    for name, text in {
        "bin/srun": '#!/bin/sh\necho srun "$@"\n',
        "launch/setup_env.sh": 'echo trainer "$1"\n',
        f"third_party/{server}/setup.sh": f'echo {server} "$1"\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bin" / "srun").chmod(0o755)
    ended = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch"), "--config=configs/polaris.py:h200x16"],
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
        | {"SLURM_NNODES": str(nodes)}
        | ({} if server == "sglang" else {"SERVER": server}),
        capture_output=True,
        text=True,
    )
    words = "srun --kill-on-bad-exit=0 --wait=0 --label bash launch/node.sh --config=configs/polaris.py:h200x16"
    joined = " --config.hosts.coordinator_address=auto" if nodes > 1 else ""
    assert ended.stdout.splitlines() == [f"{server} gpu", "trainer [gpu]", words + joined], ended.stderr
    assert ended.returncode == 0


@pytest.mark.parametrize("code", [0, 1, 137, 143])
def test_slurm_queues_a_job_again_only_if_its_run_was_saved(tmp_path: Path, code: int):
    for name, text in {
        "bin/srun": f"#!/bin/sh\nexit {code}\n",
        "bin/scontrol": '#!/bin/sh\necho scontrol "$@"\n',
        "launch/setup_env.sh": "",
        "third_party/sglang/setup.sh": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_NNODES": "1", "SLURM_JOB_ID": "7"}
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(LAUNCH / "slurm.sbatch")]
    ended = subprocess.run(command, env=path | job, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (code, "scontrol requeue 7\n" if code == 143 else "")


def test_slurm_signals_the_nodes_and_not_srun():
    """If srun receives SIGTERM, it sends SIGKILL to all nodes."""
    text = (LAUNCH / "slurm.sbatch").read_text()
    assert "#SBATCH --signal=TERM@600\n" in text and "kill" not in re.sub("#.*|--kill-on-bad-exit=0", "", text)


@pytest.mark.parametrize("program", ["nvcc", "c++", None])
def test_sglang_on_a_gpu_finds_its_compilers(tmp_path: Path, program: str | None):
    folder = tmp_path / "third_party" / "sglang"
    shutil.copytree(LAUNCH.parent / "third_party" / "sglang", folder, ignore=shutil.ignore_patterns("env-*"))
    scripts = {"bin/nvcc": "", "bin/c++": "", "bin/bash": "", "bin/dirname": ""}
    scripts |= {"env-gpu/bin/python": "#!/bin/sh\nninja\n", "env-gpu/bin/ninja": "#!/bin/sh\necho ninja\n"}
    for name, text in scripts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text or f'#!/bin/sh\nexec {shutil.which(path.name)} "$@"\n')
        path.chmod(0o755)
    (folder / "env-gpu" / "installed-1").touch()
    if program:
        (folder / "bin" / program).unlink()
    command = [str(shutil.which("bash")), str(folder / "serve.sh"), "gpu", "a model", "30000"]
    variables = {"PATH": str(folder / "bin"), "CUDA_HOME": str(tmp_path)}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True)
    if program:
        assert ended.returncode == 1 and ended.stderr.startswith("Error: SGLang requires nvcc and a C++ compiler;")
    else:
        assert (ended.returncode, ended.stdout) == (0, "ninja\n"), ended.stderr


@pytest.mark.parametrize("missing", ["ps", "setsid"])
def test_a_node_without_the_programs_that_stop_servers(tmp_path: Path, missing: str):
    tools = {"bash", "dirname", "ps", "setsid", "sed", "tail"} - {missing}
    for name in tools:
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    command = [str(shutil.which("bash")), str(LAUNCH / "node.sh"), "--config=configs/polaris.py"]
    ended = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.startswith(f"Error: {missing} was not found;")


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
    changed = re.compile("(countdown|evaluation|report)")
    assert few == [changed.sub(r"\1-20-steps", name) for name in folders("--config.seed=1")]
    base, grpo, poly_epo, *others = folders()
    assert (base, grpo, poly_epo) == ("runs/models/base", "runs/countdown-grpo", "runs/countdown-poly_epo")
    assert others == [
        f"{grpo},poly_epo={poly_epo},base={base}",
        "runs/evaluation",
        "runs/evaluation",
        grpo,
        poly_epo,
        "runs/report",
    ]
