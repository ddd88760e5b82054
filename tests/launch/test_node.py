"""Tests that launch/node.sh runs all stages, and leaves no processes or files behind after any kind of stop.

Behavior that does not depend on SGLang or the trainer is tested in a copy of the scripts, with stand-ins for both.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import flax.nnx as nnx
import jax
import numpy as np
import pytest
from fakes import PATIENCE
from reserved_ports import reserve_port
from sglang_servers import ROOT, descendants, require_sglang
from training_runs import environment, rows_of
from transformers import AutoTokenizer
from user_packages import user_variables

from poly_epo_jax.model import hf
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.transformer import Transformer
from poly_epo_jax.records.run_folder import read_rows

pytestmark = pytest.mark.slow
PR_SET_CHILD_SUBREAPER = 36
POLICY, JUDGE = 30000, 30010

SET_UP = """
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH=%s:$PATH
"""
INSTALL = """
while [ -e installing ]; do sleep 0.1; done
"""
SERVE = """
set -eu
printf '%s\\n' "$@" >"arguments-$3"
exec python server.py "$2" "$3"
"""
# A server with children in separate process groups, one of which ignores SIGTERM, and files that servers leave behind.
SERVER = """
import http.server, mmap, os, subprocess, sys, uuid

model, port = sys.argv[1:]
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('deaf', 'w'); time.sleep(600)"
if "deaf" in model:
    subprocess.Popen([sys.executable, "-c", deaf], process_group=0)
subprocess.Popen(["bash", "-c", "sleep 600 & wait"], process_group=0)
if "dies" in model:
    print("ConnectionError: an earlier error that is not the cause")
    print("The server is fired up and ready to roll!")
    for line in ("Traceback", "  File ...", "ValueError: no such model", "  see above"):
        print("(Worker pid=7) ERROR 01-01 00:00:00 [worker.py:9]", line)  # as in vLLM's log
    print("(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.")
    print("kill_process_tree called")
    sys.exit(3)
mapped = []
for name in ("sglang_loads_", "psm_"):
    with open(f"/dev/shm/{name}{uuid.uuid4().hex}", "w+b") as file:
        file.write(bytes(4096))
        file.flush()
        mapped.append(mmap.mmap(file.fileno(), 4096))
while "slow" in model:
    __import__("time").sleep(1)
http.server.HTTPServer(("127.0.0.1", int(port)), http.server.BaseHTTPRequestHandler).serve_forever()
"""
# Reads only the model of the configuration. Reading all of it takes 5 s.
COMMAND_LINE = """
import sys
from types import SimpleNamespace

def config_parser(description):
    pass

def run_command(parser, arguments, run):
    flag = "--config.model.path="
    *_, path = (word.removeprefix(flag) for word in sys.argv if word.startswith(flag))
    run(SimpleNamespace(model=SimpleNamespace(path=path)), None)
"""
# A doctor that runs while the file `examining` exists, and fails if the file `sick` exists.
DOCTOR = """
import json, pathlib, sys, time

pathlib.Path("asked.json").write_text(json.dumps(sys.argv[1:]))
while pathlib.Path("examining").exists():
    time.sleep(0.05)
if pathlib.Path("sick").exists():
    print("a table")
    sys.exit(1)
"""
# A trainer whose step ends when the file `step` exists, or fails when the server stops. It saves in both cases.
TRAINER = """
import json, os, pathlib, signal, socket, subprocess, sys, time

stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
worker = subprocess.Popen(["sleep", "600"], process_group=0)
(weights,) = [word.partition("=")[2] for word in sys.argv if "weights_dir" in word]
pathlib.Path(weights, "version").write_text("weights")
pathlib.Path("device_ids").write_text(os.environ.get("JAX_LOCAL_DEVICE_IDS", ""))
pathlib.Path("arguments.json").write_text(json.dumps(sys.argv[1:]))
while True:
    time.sleep(0.05)
    with socket.socket() as server:
        lost = server.connect_ex(("127.0.0.1", int(os.environ["PORT"]))) != 0
    if lost or pathlib.Path("step").exists():
        pathlib.Path("saved").write_text("SIGTERM" if stopped else "")
        worker.kill()
        sys.exit(1 if lost else 143 if stopped else 0)
"""


class Node:
    """Runs launch/node.sh and tracks all of its descendants. Orphans become children of this process."""

    def __init__(self, folder: Path, log: Path):
        self.folder, self._log = folder, log
        self._before = set(descendants(os.getpid()))
        self._mapped: set[str] = set()

    def start(self, *flags: str, **variables: str) -> subprocess.Popen[bytes]:
        kept = os.environ | {"XLA_FLAGS": environment()["XLA_FLAGS"]}  # one device
        with self._log.open("wb") as log:
            return subprocess.Popen(
                # As in a terminal. Background processes ignore SIGINT, which their children would inherit.
                ["env", "--default-signal=INT", "bash", "launch/node.sh", *flags],
                cwd=self.folder,
                env=kept | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, process: subprocess.Popen[bytes], until: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Waits until `until` returns a true value. The polling interval increases, because polling takes CPU time."""
        start = time.monotonic()
        while not until():
            waited = time.monotonic() - start
            assert process.poll() is None and waited < seconds, self.output()
            self._note_mapped()
            time.sleep(min(0.02 + waited / 50, 1.0))
        self._note_mapped()

    def end(self, process: subprocess.Popen[bytes], seconds: float = PATIENCE) -> int:
        """Waits for the end of the process, checks that no processes or files remain, and returns the exit code."""
        deadline = time.monotonic() + seconds
        while process.poll() is None:
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)
        assert self.processes() == [], self.output()
        assert [path for path in self._mapped if os.path.exists(path)] == []
        return process.returncode

    def output(self) -> str:
        return self._log.read_text()

    def processes(self) -> list[int]:
        """Returns the ids of all running descendants that were started after this object."""
        return [pid for pid in descendants(os.getpid()) if pid not in self._before and not _is_dead(pid)]

    def kill(self) -> None:
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            for pid in set(descendants(os.getpid())) - self._before:
                os.waitpid(pid, os.WNOHANG)

    def _note_mapped(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                self._mapped |= set(re.findall(r"/dev/shm/\S+", maps))
                arguments = Path(f"/proc/{pid}/cmdline").read_text()
                self._mapped |= set(re.findall(r"weights_dir=(/dev/shm/[^\0]+)", arguments))


def _is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@contextlib.contextmanager
def _runs_in(folder: Path, log: Path) -> Iterator[Node]:
    """Makes this process the parent of orphaned processes while it is active, and kills remaining ones at the end."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
    node = Node(folder, log)
    try:
        yield node
    finally:
        node.kill()
        prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture
def configured_trial(tmp_path: Path) -> Iterator[Node]:
    """Creates a repository of the scripts, with stand-ins for the servers, their setup, the doctor and the trainer."""
    folder = tmp_path / "repository"
    shutil.copytree(ROOT / "launch", folder / "launch")
    (folder / "poly_epo_jax").mkdir()
    (folder / "configs").symlink_to(ROOT / "configs")
    stand_ins = {
        "launch/setup_env.sh": SET_UP % Path(sys.executable).parent,
        "server.py": SERVER,
        "poly_epo_jax/doctor.py": DOCTOR,
        "poly_epo_jax/main.py": TRAINER,
        "poly_epo_jax/__init__.py": f"__path__.append({str(ROOT / 'poly_epo_jax')!r})",
    }
    for server in ("sglang", "vllm"):
        (folder / "third_party" / server).mkdir(parents=True)
        stand_ins |= {f"third_party/{server}/setup.sh": INSTALL, f"third_party/{server}/serve.sh": SERVE}
    for name, text in stand_ins.items():
        (folder / name).write_text(text)
    with _runs_in(folder, tmp_path / "output") as node:
        yield node


@pytest.fixture
def trial(configured_trial: Node) -> Node:
    """Also replaces the module that reads the configuration, for tests that set POLICY."""
    folder = configured_trial.folder / "poly_epo_jax" / "startup"
    folder.mkdir()
    (folder / "__init__.py").write_text(f"__path__.append({str(ROOT / 'poly_epo_jax' / 'startup')!r})")
    (folder / "command_line.py").write_text(COMMAND_LINE)
    return configured_trial


@pytest.fixture
def ports() -> dict[str, str]:
    return {"PORT": str(_first_port())}


def _first_port() -> int:
    """Reserves the ports of up to three policy servers and a judge, and returns the first one."""
    return reserve_port(1, 2, 10)


def _is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


CPU = {"DEVICE": "cpu", "POLICY": "a-policy", "JUDGE": "a-judge"}


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Sends SIGINT to the process group, as a terminal does on Ctrl-C."""
    os.killpg(process.pid, signal.SIGINT)


def terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()


STOPS = pytest.mark.parametrize(("stop", "code"), [(interrupt, 130), (terminate, 143)])


@STOPS
def test_stop_during_setup(trial, ports, stop, code):
    (trial.folder / "installing").touch()
    process = trial.start(**CPU, **ports)
    trial.wait(process, lambda: any("setup.sh" in _command(pid) for pid in trial.processes()))
    stop(process)
    assert trial.end(process) == code


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@STOPS
@pytest.mark.parametrize("server", ["policy-0", "judge"])
def test_stop_before_a_server_starts(trial, ports, stop, code, server):
    process = trial.start(**CPU, **ports)
    trial.wait(process, lambda: f"{server}: " in trial.output())  # the last output before the server starts
    stop(process)
    assert trial.end(process) == code


@STOPS
def test_stop_while_servers_start(trial, ports, stop, code):
    process = trial.start(**CPU | {"POLICY": "slow"}, **ports)
    trial.wait(process, lambda: _is_open(int(ports["PORT"]) + 10))
    stop(process)
    assert trial.end(process) == code


def test_repeated_stops_while_a_process_ignores_sigterm(trial, ports):
    process = trial.start(**CPU | {"POLICY": "slow-deaf"}, **ports)
    trial.wait(process, lambda: _is_open(int(ports["PORT"]) + 10) and (trial.folder / "deaf").exists())
    interrupt(process)
    trial.wait(process, lambda: not _is_open(int(ports["PORT"]) + 10))
    interrupt(process)
    terminate(process)
    assert trial.end(process) == 130


@STOPS
def test_stop_while_the_doctor_runs(trial, ports, stop, code):
    (trial.folder / "examining").touch()
    process = trial.start(**CPU, **ports)
    trial.wait(process, (trial.folder / "asked.json").exists)
    stop(process)
    assert trial.end(process) == code
    assert not (trial.folder / "arguments.json").exists()


def test_a_failed_doctor_prevents_training(trial, ports):
    (trial.folder / "sick").touch()
    process = trial.start(**CPU, **ports)
    assert trial.end(process) == 1
    assert trial.output().endswith("a table\n") and not (trial.folder / "arguments.json").exists()


def test_a_server_that_exits_while_the_doctor_runs(trial, ports):
    (trial.folder / "examining").touch()
    process = trial.start(**CPU, **ports)
    trial.wait(process, (trial.folder / "asked.json").exists)
    (server,) = [pid for pid in trial.processes() if _command(pid).endswith(f"\0{ports['PORT']}\0")]
    os.kill(server, signal.SIGKILL)
    assert trial.end(process) == 1
    assert "Error: policy-0 exited with code 137 while the doctor was running: " in trial.output()


@STOPS
def test_a_stop_during_training_completes_the_step(trial, ports, stop, code):
    process = trial.start(**CPU, **ports)
    trial.wait(process, (trial.folder / "arguments.json").exists)
    stop(process)
    trial.wait(process, lambda: "completes its update" in trial.output())
    (trial.folder / "step").touch()
    assert trial.end(process) == 143
    assert (trial.folder / "saved").read_text() == "SIGTERM"


@STOPS
def test_a_second_stop_discards_the_step(trial, ports, stop, code):
    process = trial.start(**CPU, **ports)
    trial.wait(process, (trial.folder / "arguments.json").exists)
    stop(process)
    trial.wait(process, lambda: "completes its update" in trial.output())
    stop(process)
    assert trial.end(process) == code
    assert (trial.folder / "saved").read_text() == "SIGTERM"


@pytest.mark.parametrize("flags", ["", "--one --two 3"])
def test_the_trainer_receives_the_served_models_and_determines_the_exit_code(trial, ports, flags):
    words = ["--config=configs/polaris.py:grpo", "--config.seed=1", "--config.rollouts.wait_seconds=7"]
    variables = {"POLICY_FLAGS": flags, "JUDGE_FLAGS": flags} if flags else {}
    process = trial.start(*words, **CPU, **ports, **variables)
    (trial.folder / "step").touch()
    assert trial.end(process) == 0, trial.output()
    arguments = json.loads((trial.folder / "arguments.json").read_text())
    assert arguments[0] == words[0] and arguments[-2:] == words[1:]
    assert "--config.model.path=a-policy" in arguments[1:-2] and "--config.model.dtype=float32" in arguments[1:-2]
    assert f"--config.rollouts.urls=http://127.0.0.1:{ports['PORT']}" in arguments
    assert json.loads((trial.folder / "asked.json").read_text()) == ["--short", *arguments]
    assert (trial.folder / f"arguments-{ports['PORT']}").read_text().splitlines()[3:] == flags.split()


@pytest.mark.parametrize(
    ("variables", "server", "gpu_flags", "judge_flag"),
    [
        ({}, "sglang", "--mem-fraction-static 0.50 --base-gpu-id", "--constrained-json-disable-any-whitespace"),
        ({"SERVER": "vllm"}, "vllm", "--gpu-memory-utilization 0.50 --device-ids", "--structured-outputs-config"),
    ],
)
def test_defaults_are_the_models_of_the_paper_on_four_gpus(
    configured_trial, ports, tmp_path, variables, server, gpu_flags, judge_flag
):
    list_gpus = tmp_path / "nvidia-smi"
    list_gpus.write_text("#!/bin/sh\nfor i in 0 1 2 3; do echo GPU $i: NVIDIA H200; done\n")
    list_gpus.chmod(0o755)
    process = configured_trial.start(**ports, **variables, PATH=f"{tmp_path}:{os.environ['PATH']}")
    (configured_trial.folder / "step").touch()
    assert configured_trial.end(process) == 0, configured_trial.output()
    started = re.findall(r"^(\S+): (\S+) on port", configured_trial.output(), re.MULTILINE)
    policies = [(f"policy-{i}", "Qwen/Qwen3-4B-Base") for i in range(3)]
    assert started == [*policies, ("judge", "Qwen/Qwen3-4B-Instruct-2507")]
    arguments = json.loads((configured_trial.folder / "arguments.json").read_text())
    assert "--config=configs/polaris.py" in arguments and f"--config.rollouts.name={server}" in arguments
    for gpu, offset in enumerate((0, 1, 2, 10)):
        flags = (configured_trial.folder / f"arguments-{int(ports['PORT']) + offset}").read_text().splitlines()
        assert flags[0] == "gpu" and flags[3:7] == [*gpu_flags.split(), str(gpu)]
        assert (judge_flag in flags) == (offset == 10)


def test_vllm_serves_an_untied_copy_on_cpus(trial, ports, tmp_path):
    """A tied model has the output head of its embedding, and the trainer trains the model that is served."""
    tied = ModelConfig(vocab_size=32, hidden_size=8, mlp_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8)
    params = nnx.to_pure_dict(nnx.split(Transformer(tied, nnx.Rngs(0)))[1])
    hf.save_pretrained(tmp_path / "tied", params, tied, dtype="float32", eos_token_id=7)
    policy = {"POLICY": str(tmp_path / "tied"), "SERVER": "vllm"}
    process = trial.start("--config=configs/polaris.py", "--config.seed=1", **CPU | policy, **ports)
    (trial.folder / "step").touch()
    assert trial.end(process) == 0, trial.output()
    assert f"policy-0: runs/logs/untied on port {ports['PORT']}" in trial.output()
    assert trial.output().count("tied embeddings") == 1
    arguments = json.loads((trial.folder / "arguments.json").read_text())
    assert arguments[-1] == "--config.model.path=runs/logs/untied"
    folder = trial.folder / "runs" / "logs" / "untied"
    untied = hf.read_model_config(folder, dtype=tied.dtype)
    assert untied == dataclasses.replace(tied, tie_word_embeddings=False)
    copied = hf.load_params(folder, untied)
    np.testing.assert_array_equal(copied.pop("untied_head"), params["embed"])
    jax.tree.map(np.testing.assert_array_equal, copied, params)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 7


def test_every_visible_gpu_has_a_server_if_the_judge_is_elsewhere(configured_trial, ports):
    url = "http://judge:30010"
    process = configured_trial.start(**ports, CUDA_VISIBLE_DEVICES="6,7", JUDGE_URL=url, SLURM_NNODES="2")
    (configured_trial.folder / "step").touch()
    assert configured_trial.end(process) == 0, configured_trial.output()
    assert re.findall(r"^(\S+): \S+ on port", configured_trial.output(), re.MULTILINE) == ["policy-0", "policy-1"]
    arguments = json.loads((configured_trial.folder / "arguments.json").read_text())
    assert [flag for flag in arguments if "judge.url" in flag] == [f"--config.judge.url={url}"]
    assert (configured_trial.folder / "device_ids").read_text() == "0,1"


@pytest.mark.parametrize(
    ("variables", "needed"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "1 policy server(s) and 1 judge(s) require a GPU each, but 0 are visible"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, "1 policy server(s) and 1 judge(s) require a GPU each, but 1 are visible"),
        (
            {"CUDA_VISIBLE_DEVICES": "0,1", "SERVERS": "3", "JUDGE_URL": "http://judge:30010"},
            "3 policy server(s) and 0 judge(s) require a GPU each, but 2 are visible",
        ),
    ],
)
def test_too_few_gpus_are_reported_before_anything_is_installed(trial, ports, variables, needed):
    process = trial.start(**ports, **variables)
    assert trial.end(process) == 1
    assert trial.output().startswith(f"Error: {needed}; ") and trial.output().count("\n") == 1


def test_a_missing_python_for_sglang_is_reported_before_anything_is_installed(trial, ports):
    shutil.copytree(
        ROOT / "third_party" / "sglang",
        trial.folder / "third_party" / "sglang",
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("env-*"),
    )
    with (trial.folder / "launch" / "setup_env.sh").open("a") as file:
        file.write("touch installed\n")
    process = trial.start(**CPU, **ports, SGLANG_PYTHON="no-python")
    assert trial.end(process) == 1
    assert "Error: SGLang for cpu requires Python 3.11, but no-python is missing" in trial.output()
    assert not (trial.folder / "installed").exists()


def test_the_model_of_the_configuration_is_served(configured_trial, ports):
    process = configured_trial.start("--config.model.path=another", DEVICE="cpu", JUDGE="a-judge", **ports)
    (configured_trial.folder / "step").touch()
    assert configured_trial.end(process) == 0
    assert f"policy-0: another on port {ports['PORT']}" in configured_trial.output()


def test_an_invalid_flag_is_reported_before_servers_start(configured_trial, ports):
    process = configured_trial.start("--config.sed=1", **CPU, **ports)
    assert configured_trial.end(process) == 1
    assert "config.sed" in configured_trial.output() and "policy-0" not in configured_trial.output()


def test_a_server_that_exits_during_startup(trial, ports):
    process = trial.start(**CPU | {"POLICY": "dies", "JUDGE": "slow"}, **ports)
    assert trial.end(process) == 1
    (line,) = [line for line in trial.output().splitlines() if line.startswith("Error")]
    cause = "ValueError: no such model; see runs/logs/policy-0.log"
    assert line == f"Error: policy-0 exited with code 3 during startup: {cause}"


@pytest.mark.parametrize("name", ["policy-0", "judge"])
def test_a_server_that_exits_during_training(trial, ports, name):
    process = trial.start(**CPU, **ports)
    trial.wait(process, (trial.folder / "arguments.json").exists)
    port = int(ports["PORT"]) + (10 if name == "judge" else 0)
    (server,) = [pid for pid in trial.processes() if _command(pid).endswith(f"\0{port}\0")]
    os.kill(server, signal.SIGKILL)
    assert trial.end(process) == 1
    assert f"Error: {name} exited with code 137 while the trainer was running: " in trial.output()
    assert (trial.folder / "saved").exists()


def test_a_port_in_use_is_reported_before_processes_start(trial):
    first = _first_port()
    with socket.create_server(("127.0.0.1", port := first + 10)):
        process = trial.start(**CPU, PORT=str(first))
        assert trial.end(process) == 1
    assert trial.output().startswith(f"Error: port {port} is in use; ") and trial.output().count("\n") == 1
    assert not (trial.folder / "runs").exists()


@pytest.fixture(scope="module")
def small_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a small Qwen3 model with random weights and the original vocabulary."""
    require_sglang()
    folder = tmp_path_factory.mktemp("model") / "model"
    config = ModelConfig(
        vocab_size=151_669,
        hidden_size=32,
        mlp_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        dtype="float32",
    )
    params = nnx.to_pure_dict(nnx.split(Transformer(config, nnx.Rngs(0)))[1])
    hf.save_pretrained(folder, params, config, dtype="float32", eos_token_id=151_643)
    AutoTokenizer.from_pretrained(_shared() / "tokenizers" / "qwen3").save_pretrained(folder)
    return folder


def _shared() -> Path:
    shared = os.environ.get("POLY_EPO_SHARED")
    if not shared:
        pytest.skip("POLY_EPO_SHARED is not set to the folder with the tokenizer and the problems.")
    return Path(shared)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Runs launch/node.sh in the repository."""
    with _runs_in(ROOT, tmp_path / "output") as node:
        yield node


def test_every_stage_of_the_papers_run(small_qwen, node, tmp_path):
    """Trains for two steps on real problems."""
    data = _shared() / "data" / "math"
    settings = {
        "workdir": tmp_path / "run",
        "compilation_cache_dir": tmp_path / "compiled",
        "task.options": {"train": str(data / "gsm8k_train.jsonl"), "held_out": str(data / "aime_2025.jsonl")},
        "sampling.max_tokens": 20,
        "train.prompts_per_batch": 2,
        "train.prompts_per_minibatch": 1,
        "train.num_generations": 4,
        "train.max_prompt_tokens": 250,
        "train.row_tokens": 300,
        "algo.set_size": 2,
        "algo.entropy_coef": 0.01,  # a gradient without reward: the weights are random
        "optimizer.learning_rate": 1e-3,
        "eval.every": 2,
        "eval.num_problems": 2,
        "eval.num_generations": 2,
        "judge.options.max_tokens": 512,
    }
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    models = {"DEVICE": "cpu", "POLICY": str(small_qwen), "JUDGE": str(small_qwen)} | user_variables()
    port = {} if not _is_open(POLICY) and not _is_open(JUDGE) else {"PORT": str(_first_port())}
    process = node.start(*flags, "--config.train.num_steps=2", **models, **port)
    node.wait(process, lambda: "Done: " in node.output(), 1200)
    assert node.end(process) == 0, node.output()
    # The doctor has passed all checks before training. Collectives are skipped, because there is one device.
    assert "Doctor: 6 passed, 0 failed, 1 skipped." in node.output()

    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["judge/failed_prompts"] == 0 and row["mismatch/max"] < 1e-3 for row in rows)
    assert all(row["policy/update_norm"] > 0 for row in rows)
    assert all(0 <= row["judge/overlap_fraction"] <= 1 for row in read_rows(tmp_path / "run" / "timing.jsonl"))
    generations = read_rows(tmp_path / "run" / "generations.jsonl")
    assert len(generations) == 2 * 2 * 4
    assert {row["cluster"] for row in generations} <= {1, 2, 3, 4, 100}
    # Rows contain the user message. The chat template is only added to its tokens.
    assert all(row["rationale"] and row["prompt"].endswith("inside \\boxed{}.") for row in generations)
    counts = json.loads((tmp_path / "run" / "data.json").read_text())
    assert counts["train"]["kept"] + sum(counts["train"]["dropped"].values()) == 7473
    assert counts["held_out"]["dropped"]["too_long"] > 0


def test_a_folder_without_a_model(node, tmp_path):
    """The error message quotes the log of SGLang."""
    require_sglang()
    judge = {"JUDGE_URL": "http://judge:30010"}
    process = node.start(DEVICE="cpu", POLICY=str(tmp_path), PORT=str(_first_port()), **judge)
    assert node.end(process) == 1
    (line,) = [line for line in node.output().splitlines() if line.startswith("Error")]
    assert f"policy-0 exited with code 1 during startup: ValueError: Unrecognized model in {tmp_path}" in line
