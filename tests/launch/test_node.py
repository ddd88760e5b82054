"""launch/node.sh: the paper's run as a user types it, and that nothing of it remains, whatever stops it and when.

Everything that does not depend on SGLang and the trainer is tested in a copy of the scripts, with stand-ins for both.
"""

import contextlib
import ctypes
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
import pytest
from fakes import PATIENCE
from sglang_servers import ROOT, descendants, free_port, require_sglang
from training_runs import rows_of
from transformers import AutoTokenizer
from user_packages import user_variables

from poly_epo_jax.model import hf
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.qwen3 import Qwen3
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
exec python third_party/sglang/server.py "$2" "$3"
"""
# A server with children in their own process groups, one of which ignores SIGTERM, and a file like those SGLang leaves.
SERVER = """
import http.server, mmap, os, subprocess, sys, uuid

model, port = sys.argv[1:]
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
if "deaf" in model:
    subprocess.Popen([sys.executable, "-c", deaf], process_group=0)
subprocess.Popen(["bash", "-c", "sleep 600 & wait"], process_group=0)
if "dies" in model:
    print("ConnectionError: of a request that does not matter")
    print("The server is fired up and ready to roll!")
    print("Traceback (most recent call last):", "  File ...", "ValueError: no such model", "  see above", sep=chr(10))
    print("kill_process_tree called")
    sys.exit(3)
with open(f"/dev/shm/sglang_loads_{uuid.uuid4().hex}.shm", "w+b") as file:
    file.write(bytes(4096))
    file.flush()
    loads = mmap.mmap(file.fileno(), 4096)
while "slow" in model:
    __import__("time").sleep(1)
http.server.HTTPServer(("127.0.0.1", int(port)), http.server.BaseHTTPRequestHandler).serve_forever()
"""
# A doctor that runs as long as one file is there, and finds something if another is.
DOCTOR = """
import json, pathlib, sys, time

pathlib.Path("asked.json").write_text(json.dumps(sys.argv[1:]))
while pathlib.Path("examining").exists():
    time.sleep(0.05)
if pathlib.Path("sick").exists():
    print("a table")
    sys.exit(1)
"""
# A trainer whose step ends when the file says so, or fails without its server; on SIGTERM it saves in both cases.
TRAINER = """
import json, os, pathlib, signal, socket, subprocess, sys, time

stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
worker = subprocess.Popen(["sleep", "600"], process_group=0)
(weights,) = [word.partition("=")[2] for word in sys.argv if "weights_dir" in word]
pathlib.Path(weights, "version").write_text("weights")
pathlib.Path("arguments.json").write_text(json.dumps(sys.argv[1:]))
while True:
    time.sleep(0.05)
    with socket.socket() as server:
        lost = server.connect_ex(("127.0.0.1", int(os.environ["PORT"]))) != 0
    if lost or pathlib.Path("step").exists():
        pathlib.Path("saved").write_text("told" if stopped else "")
        worker.kill()
        sys.exit(1 if lost else 143 if stopped else 0)
"""


class Node:
    """Runs of launch/node.sh whose every descendant is known: orphans become children of this process."""

    def __init__(self, folder: Path, log: Path):
        self.folder, self._log = folder, log
        self._before = set(descendants(os.getpid()))
        self._mapped: set[str] = set()

    def start(self, *flags: str, **variables: str) -> subprocess.Popen[bytes]:
        # XLA_FLAGS are those of conftest.py, which make compiling fast and everything else slow.
        kept = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        with self._log.open("wb") as log:
            return subprocess.Popen(
                # As in a terminal: background processes ignore Ctrl-C, and would pass that on.
                ["env", "--default-signal=INT", "bash", "launch/node.sh", *flags],
                cwd=self.folder,
                env=kept | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, process: subprocess.Popen[bytes], until: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Returns once `until` holds. The longer that takes, the less often it looks, as looking takes time, too."""
        start = time.monotonic()
        while not until():
            waited = time.monotonic() - start
            assert process.poll() is None and waited < seconds, self.said()
            self._note_mapped()
            time.sleep(min(0.02 + waited / 50, 1.0))
        self._note_mapped()

    def end(self, process: subprocess.Popen[bytes], seconds: float = PATIENCE) -> int:
        """The exit code, where nothing is left of the run."""
        deadline = time.monotonic() + seconds
        while process.poll() is None:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)
        assert self.processes() == [], self.said()
        assert [path for path in self._mapped if os.path.exists(path)] == []
        return process.returncode

    def said(self) -> str:
        return self._log.read_text()

    def processes(self) -> list[int]:
        """All that runs, whoever started it."""
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
    """Meanwhile orphans become this process's children instead of init's; what is left at the end is killed."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
    node = Node(folder, log)
    try:
        yield node
    finally:
        node.kill()
        prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Node]:
    """A repository of the scripts, with stand-ins for the servers, their set-up and the trainer."""
    folder = tmp_path / "repository"
    shutil.copytree(ROOT / "launch", folder / "launch")
    (folder / "third_party" / "sglang").mkdir(parents=True)
    (folder / "poly_epo_jax").mkdir()
    (folder / "configs").symlink_to(ROOT / "configs")
    stand_ins = {
        "launch/setup_env.sh": SET_UP % Path(sys.executable).parent,
        "third_party/sglang/setup.sh": INSTALL,
        "third_party/sglang/serve.sh": SERVE,
        "third_party/sglang/server.py": SERVER,
        "poly_epo_jax/doctor.py": DOCTOR,
        "poly_epo_jax/main.py": TRAINER,
        "poly_epo_jax/__init__.py": f"__path__.append({str(ROOT / 'poly_epo_jax')!r})",
    }
    for name, text in stand_ins.items():
        (folder / name).write_text(text)
    with _runs_in(folder, tmp_path / "said") as node:
        yield node


@pytest.fixture
def ports() -> dict[str, str]:
    return {"PORT": str(_free_ports())}


def _free_ports() -> int:
    """That of the first policy server, which is free, as are the others and the judge's."""
    while True:
        port = free_port()
        if port + 10 < 65536 and not any(map(_is_open, (port + 1, port + 2, port + 10))):
            return port


def _is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


CPU = {"DEVICE": "cpu", "POLICY": "a-policy", "JUDGE": "a-judge"}


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, as a terminal sends it."""
    os.killpg(process.pid, signal.SIGINT)


def terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()


STOPS = pytest.mark.parametrize(("stop", "code"), [(interrupt, 130), (terminate, 143)])


@STOPS
def test_a_stop_while_it_is_set_up(trial, ports, stop, code):
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
def test_a_stop_as_a_server_is_started(trial, ports, stop, code, server):
    process = trial.start(**CPU, **ports)
    trial.wait(process, lambda: f"{server}: " in trial.said())  # the last line before it is
    stop(process)
    assert trial.end(process) == code


@STOPS
def test_a_stop_while_servers_start(trial, ports, stop, code):
    process = trial.start(**CPU | {"POLICY": "slow"}, **ports)
    trial.wait(process, lambda: _is_open(int(ports["PORT"]) + 10))
    stop(process)
    assert trial.end(process) == code


def test_stops_while_it_stops_what_does_not_heed_sigterm(trial, ports):
    process = trial.start(**CPU | {"POLICY": "slow-deaf"}, **ports)
    trial.wait(process, lambda: _is_open(int(ports["PORT"]) + 10))
    interrupt(process)
    trial.wait(process, lambda: not _is_open(int(ports["PORT"]) + 10))
    interrupt(process)
    terminate(process)
    assert trial.end(process) == 130


@STOPS
def test_a_stop_while_the_doctor_looks(trial, ports, stop, code):
    (trial.folder / "examining").touch()
    process = trial.start(**CPU, **ports)
    trial.wait(process, (trial.folder / "asked.json").exists)
    stop(process)
    assert trial.end(process) == code
    assert not (trial.folder / "arguments.json").exists()


def test_what_the_doctor_finds_ends_it_before_it_trains(trial, ports):
    (trial.folder / "sick").touch()
    process = trial.start(**CPU, **ports)
    assert trial.end(process) == 1
    assert trial.said().endswith("a table\n") and not (trial.folder / "arguments.json").exists()


def test_a_server_that_ends_while_the_doctor_looks(trial, ports):
    (trial.folder / "examining").touch()
    process = trial.start(**CPU, **ports)
    trial.wait(process, (trial.folder / "asked.json").exists)
    (server,) = [pid for pid in trial.processes() if _command(pid).endswith(f"\0{ports['PORT']}\0")]
    os.kill(server, signal.SIGKILL)
    assert trial.end(process) == 1
    assert "Error: policy-0 ended with code 137 while the doctor looked: " in trial.said()


@STOPS
def test_a_stop_while_it_trains_lets_the_step_end(trial, ports, stop, code):
    process = trial.start(**CPU, **ports)
    trial.wait(process, (trial.folder / "arguments.json").exists)
    stop(process)
    trial.wait(process, lambda: "completes its update" in trial.said())
    (trial.folder / "step").touch()
    assert trial.end(process) == 143
    assert (trial.folder / "saved").read_text() == "told"


@STOPS
def test_a_second_stop_gives_the_step_up(trial, ports, stop, code):
    process = trial.start(**CPU, **ports)
    trial.wait(process, (trial.folder / "arguments.json").exists)
    stop(process)
    trial.wait(process, lambda: "completes its update" in trial.said())
    stop(process)
    assert trial.end(process) == code
    assert (trial.folder / "saved").read_text() == "told"


@pytest.mark.parametrize("flags", ["", "--one", "--one --two 3"])
def test_it_ends_as_the_trainer_does_who_trains_what_is_served(trial, ports, flags):
    words = ["--config=configs/polaris.py:grpo", "--config.seed=1", "--config.rollouts.wait_seconds=7"]
    variables = {"POLICY_FLAGS": flags, "JUDGE_FLAGS": flags} if flags else {}
    process = trial.start(*words, **CPU, **ports, **variables)
    (trial.folder / "step").touch()
    assert trial.end(process) == 0, trial.said()
    told = json.loads((trial.folder / "arguments.json").read_text())
    assert told[0] == words[0] and told[-2:] == words[1:]
    assert "--config.model.path=a-policy" in told[1:-2] and "--config.model.dtype=float32" in told[1:-2]
    assert f"--config.rollouts.urls=http://127.0.0.1:{ports['PORT']}" in told
    assert json.loads((trial.folder / "asked.json").read_text()) == ["--short", *told]


def test_without_variables_it_serves_the_papers_models_on_four_gpus(trial, ports):
    process = trial.start(**ports)
    (trial.folder / "step").touch()
    assert trial.end(process) == 0, trial.said()
    started = re.findall(r"^(\S+): (\S+) on port", trial.said(), re.MULTILINE)
    policies = [(f"policy-{i}", "Qwen/Qwen3-4B-Base") for i in range(3)]
    assert started == [*policies, ("judge", "Qwen/Qwen3-4B-Instruct-2507")]
    assert "--config=configs/polaris.py" in json.loads((trial.folder / "arguments.json").read_text())


def test_the_model_of_the_configuration_is_served(trial, ports):
    process = trial.start("--config.model.path=another", DEVICE="cpu", JUDGE="a-judge", **ports)
    (trial.folder / "step").touch()
    assert trial.end(process) == 0
    assert f"policy-0: another on port {ports['PORT']}" in trial.said()


def test_a_wrong_flag_is_told_before_servers_start(trial, ports):
    process = trial.start("--config.sed=1", **CPU, **ports)
    assert trial.end(process) == 1
    assert "There is no key config.sed" in trial.said() and "policy-0" not in trial.said()


def test_a_server_that_ends_before_it_answers(trial, ports):
    process = trial.start(**CPU | {"POLICY": "dies", "JUDGE": "slow"}, **ports)
    assert trial.end(process) == 1
    (line,) = [line for line in trial.said().splitlines() if line.startswith("Error")]
    cause = "ValueError: no such model; see runs/logs/policy-0.log"
    assert line == f"Error: policy-0 ended with code 3 before it answered: {cause}"


@pytest.mark.parametrize("name", ["policy-0", "judge"])
def test_a_server_that_ends_while_it_trains(trial, ports, name):
    process = trial.start(**CPU, **ports)
    trial.wait(process, (trial.folder / "arguments.json").exists)
    port = int(ports["PORT"]) + (10 if name == "judge" else 0)
    (server,) = [pid for pid in trial.processes() if _command(pid).endswith(f"\0{port}\0")]
    os.kill(server, signal.SIGKILL)
    assert trial.end(process) == 1
    assert f"Error: {name} ended with code 137 while the trainer ran: " in trial.said()
    assert (trial.folder / "saved").exists()


def test_a_taken_port_is_told_before_anything_is_started(trial):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = trial.start(**CPU, PORT=str(port - 10))
        assert trial.end(process) == 1
    assert trial.said() == f"Error: port {port} is taken; stop what listens there, or set PORT to another port.\n"
    assert not (trial.folder / "runs").exists()


@pytest.fixture(scope="module")
def small_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of a Qwen3 with the true vocabulary."""
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
        rope_theta=1e6,
        dtype="float32",
    )
    params = nnx.to_pure_dict(nnx.split(Qwen3(config, nnx.Rngs(0)))[1])
    hf.save_pretrained(folder, params, config, dtype="float32", eos_token_id=151_643)
    AutoTokenizer.from_pretrained(_shared() / "tokenizers" / "qwen3").save_pretrained(folder)
    return folder


def _shared() -> Path:
    shared = os.environ.get("POLY_EPO_SHARED")
    if not shared:
        pytest.skip("POLY_EPO_SHARED does not name the folder that holds the tokenizer and the problems.")
    return Path(shared)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """The repository itself."""
    with _runs_in(ROOT, tmp_path / "said") as node:
        yield node


def test_every_stage_of_the_papers_run(small_qwen, node, tmp_path):
    """Three steps on real problems."""
    data = _shared() / "data" / "math"
    settings = {
        "workdir": tmp_path / "run",
        "compilation_cache": tmp_path / "compiled",
        "task.options": {"train": str(data / "gsm8k_train.jsonl"), "held_out": str(data / "aime_2025.jsonl")},
        "sampling.max_tokens": 40,
        "train.prompts_per_batch": 4,
        "train.prompts_per_minibatch": 2,
        "train.num_generations": 4,
        "train.max_prompt_tokens": 250,
        "train.row_tokens": 300,
        "algo.set_size": 2,
        "algo.entropy_coef": 0.01,  # random weights earn no reward to learn from
        "optimizer.learning_rate": 1e-3,
        "eval.every": 3,
        "eval.num_problems": 2,
        "eval.num_generations": 4,
        "judge.options.max_tokens": 512,
    }
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    models = {"DEVICE": "cpu", "POLICY": str(small_qwen), "JUDGE": str(small_qwen)} | user_variables()
    port = {} if not _is_open(POLICY) and not _is_open(JUDGE) else {"PORT": str(_free_ports())}
    process = node.start(*flags, "--config.train.num_steps=3", **models, **port)
    node.wait(process, lambda: "Done: " in node.said(), 1200)
    assert node.end(process, 60) == 0, node.said()
    # Before that, the doctor has passed everything that is here: one device has no collectives.
    assert "Doctor: 6 passed, 0 failed, 1 not there." in node.said()

    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["judge/failed_prompts"] == 0 and row["mismatch/max"] < 1e-3 for row in rows)
    assert all(row["policy/update_norm"] > 0 for row in rows)
    assert all(0 <= row["judge/hidden"] <= 1 for row in read_rows(tmp_path / "run" / "timing.jsonl"))
    generations = read_rows(tmp_path / "run" / "generations.jsonl")
    assert len(generations) == 3 * 4 * 4
    assert {row["cluster"] for row in generations} <= {1, 2, 3, 4, 100}
    # The prompt is the user's message; the tokenizer's chat template surrounds only its tokens.
    assert all(row["rationale"] and row["prompt"].endswith("inside \\boxed{}.") for row in generations)
    counts = json.loads((tmp_path / "run" / "data.json").read_text())
    assert counts["train"]["kept"] + sum(counts["train"]["dropped"].values()) == 7473
    assert counts["held_out"]["dropped"]["too_long"] > 0


def test_a_folder_without_a_model(small_qwen, node, tmp_path):
    """SGLang's own log tells the reason, and the judge's server is stopped while it starts."""
    port = {"PORT": str(_free_ports())}
    process = node.start(DEVICE="cpu", POLICY=str(tmp_path), JUDGE=str(small_qwen), **port)
    assert node.end(process, 120) == 1
    (line,) = [line for line in node.said().splitlines() if line.startswith("Error")]
    assert f"policy-0 ended with code 1 before it answered: ValueError: Unrecognized model in {tmp_path}" in line
