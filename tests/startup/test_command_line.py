"""Command line: --help, --print_config, and users' configuration files, which register components."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import ForkServer

from poly_epo_jax.config.keys import Config
from poly_epo_jax.tasks import TASKS

ROOT = Path(__file__).parents[2]
FILE = "--config=configs/polynomial.py"


Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python(fork_server: ForkServer) -> Python:
    """Runs `python -m poly_epo_jax.MODULE ARGUMENTS` in a folder, on one device."""

    def run(module: str, *arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
        return fork_server.run(f"poly_epo_jax.{module}", arguments, folder)

    return run


@pytest.mark.parametrize(
    ("module", "arguments", "flag", "title"),
    [
        ("main", [], "--print_config", "Trains a policy"),
        ("evaluate", [FILE], "--benchmarks", "Evaluates and compares models"),
        ("bench", ["--config=configs/polaris.py"], "--plan_all_meshes", "Measures the stages"),
    ],
)
def test_help_lists_flags_and_keys(python: Python, module: str, arguments: list[str], flag: str, title: str):
    ended = python(module, *arguments, "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(title)
    lines = [line.strip() for line in ended.stdout.splitlines()]
    assert any(line.startswith(f"{flag} ") for line in lines)
    for key, field, value in Config().flat():
        (line,) = [line for line in lines if line.startswith(f"{key} = ")]
        if not arguments:
            assert line.startswith(f"{key} = {value!r} ")
            assert " ".join(field.metadata["meaning"].split()[:3]) in " ".join(ended.stdout.split())
    if module == "bench":  # the help shows the values of the file
        assert any(line.startswith("train.row_tokens = 16384 ") for line in lines)


def test_print_config_prints_each_key_without_running(python: Python, tmp_path: Path):
    ended = python("main", FILE + ":grpo", "--config.seed=3", "--print_config", f"--config.workdir={tmp_path / 'run'}")
    assert (ended.returncode, ended.stderr) == (0, "")
    values = dict(line.split(" = ", 1) for line in ended.stdout.splitlines())
    assert values.keys() == {key for key, _, _ in Config().flat()}
    assert (values["seed"], values["algo.advantages"], values["task.options"]) == ("3", "'grpo'", "{}")
    assert not (tmp_path / "run").exists()


MINE = """
from poly_epo_jax import set_rl
from poly_epo_jax.config import default
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.tasks import TASKS, PolynomialTask


class Easier(PolynomialTask):
    pass


TASKS["{task}"] = Easier


def get_config(config_string=""):
    config = default.get_config(config_string)
    config.task.name = "{task}"
    config.workdir = "runs/mine"
    return config
"""


def test_a_configuration_file_registers_components(python: Python, tmp_path: Path):
    (tmp_path / "mine.py").write_text(MINE.format(task="easier"))
    options = "--config.task.options={'num_train': 20}", "--config.task.options.num_held_out=5"
    ended = python("main", "--config=mine.py:grpo", *options, "--print_config", folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "task.name = 'easier'\ntask.options = {'num_held_out': 5, 'num_train': 20}\n" in ended.stdout

    ended = python("bench", "--config=mine.py", "--plan", "--config.task.options.num_trian=20", folder=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        "Error: task.options has 'num_trian', which easier does not accept; did you mean num_t"
    )


def test_a_registered_component_needs_a_new_name(python: Python, tmp_path: Path):
    (tmp_path / "mine.py").write_text(MINE.format(task="math"))
    ended = python("main", "--config=mine.py", "--print_config", folder=tmp_path)
    assert ended.returncode == 1
    taken = ", ".join(TASKS)
    assert ended.stderr.splitlines()[-1] == (
        f"Error: The name 'math' is already registered; choose a name other than {taken}."
    )


def test_every_command_checks_the_configuration(python: Python):
    for module, flags in (("evaluate", ["--models=x", "--benchmarks=polynomial"]), ("bench", ["--plan"])):
        ended = python(module, FILE, "--config.judge.name=jury", *flags)
        assert ended.returncode == 1
        assert ended.stderr.startswith("Error: judge.name='jury' must be one of ")


def test_a_plan_does_not_overwrite_the_results_of_bench(python: Python, tmp_path: Path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "bench.json").write_text("figures")
    (tmp_path / "mine.py").write_text(MINE.format(task="easier"))
    ended = python("bench", "--config=mine.py", "--plan", "--config.mesh.fsdp=1", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "runs" / "bench.json").read_text() == "figures"
    assert '"peak_bytes"' in (tmp_path / "runs" / "plan.json").read_text()


CTRL_C_AT_THE_END = """
import atexit, os, signal
atexit.register(os.kill, os.getpid(), signal.SIGINT)  # during the exit handlers of imports, such as those of JAX
from poly_epo_jax.startup.command_line import config_parser, run_command
arguments = ["--config=configs/polynomial.py"]
run_command(config_parser(None), arguments, lambda config, flags: print("done", flush=True))
"""


@pytest.mark.slow
def test_ctrl_c_at_exit_does_not_print_a_traceback():
    command = [sys.executable, "-c", CTRL_C_AT_THE_END]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
