"""Training from a script or a notebook writes the same bytes and stops in the same way as the command."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import halting
import pytest
from fakes import until
from fork_server import ForkServer
from training_runs import SETTINGS, Run, as_flags, environment, rows_of

import poly_epo_jax
from poly_epo_jax.config.keys import Config
from poly_epo_jax.records.run_folder import METRICS, read_method
from poly_epo_jax.system.signals import Stopped, StopSignal

ROOT = Path(__file__).parents[1]
(BLOCK,) = re.findall(r"```python\n(from poly_epo_jax import g.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

SMALL = """
import ast, asyncio, sys
from poly_epo_jax import from_python

def small(recipe="", get_config=from_python.get_config):
    config = get_config(recipe)
    for key, value in {settings!r}.items():
        config.update_from_flattened_dict({{key: ast.literal_eval(value) if key == "task.options" else value}})
    return config

from_python.get_config = small
"""
"""Applies the settings of `training_runs`, which make a run small."""

IN_A_NOTEBOOK = """
import json, types

class Image:
    def __init__(self, path, width):
        assert open(path, "rb").read(4) == b"\\x89PNG"

async def notebook():
    names = dict(__name__="__main__")
    for cell in json.loads(sys.argv[1]):
        exec(cell, names)

# Modules that notebooks provide.
sys.modules["IPython.display"] = types.SimpleNamespace(Image=Image, display=lambda it: None)
asyncio.new_event_loop().run_until_complete(notebook())  # asyncio.run would handle Ctrl-C, unlike Jupyter
"""
"""Runs cells in a thread with a running event loop, as in Jupyter, which would require 31 additional packages."""


CELL = "from poly_epo_jax import get_config, run\nconfig = get_config()\nconfig.workdir = 'cell'\nrun(config)"


def start(code: str, settings: dict, folder: Path, *cells: str) -> subprocess.Popen[str]:
    text = {key: value if isinstance(value, int | float) else str(value) for key, value in settings.items()}
    return subprocess.Popen(
        [sys.executable, "-c", SMALL.format(settings=text) + code, json.dumps(cells)],
        cwd=folder,
        env=environment(path=ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("recipe", "advantages", "workdir"),
    [
        ("", "marginal_set", Config().workdir),
        (":grpo", "grpo", Config().workdir),
        ("polaris", "marginal_set", "runs/polaris-poly_epo"),
        ("polaris:grpo,h200x8", "grpo", "runs/polaris-grpo"),
        (str(ROOT / "configs/polynomial.py:max_rl"), "max_rl", "runs/polynomial-max_rl"),
    ],
)
def test_recipes(recipe: str, advantages: str, workdir: str):
    config = poly_epo_jax.get_config(recipe)
    assert (config.algo.advantages, config.workdir) == (advantages, workdir)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("grpo", 'write ":grpo"'),
        ("grpo,h200x8", 'write ":grpo,h200x8"'),
        ("polynomail:grpo", "did you mean polynomial"),
        (":grop", "Unknown name ':grop'"),
    ],
)
def test_unknown_recipes(recipe: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        poly_epo_jax.get_config(recipe)


def test_missing_attributes_raise_the_usual_errors():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = poly_epo_jax.trian
    with pytest.raises(ImportError, match="cannot import name 'trian'"):
        exec("from poly_epo_jax import trian")


@pytest.mark.slow
def test_the_readme_example_trains_in_a_script(tmp_path: Path, caches: dict[str, Path]):
    process = start(BLOCK, SETTINGS | caches | {"train.num_steps": 2}, tmp_path)
    out, err = process.communicate(timeout=halting.SECONDS)
    assert process.returncode == 0, err
    assert "Done: runs/careful." in out
    assert read_method(tmp_path / "runs/careful") == "Careful"
    assert [row["step"] for row in rows_of(tmp_path / "runs/careful")] == [1, 2]


@pytest.mark.slow
def test_a_notebook_writes_the_bytes_of_the_command(tmp_path: Path, caches: dict[str, Path], fork_server: ForkServer):
    """The thread of a notebook already runs an event loop."""
    settings = caches | {"train.num_steps": 3}
    command = Run(tmp_path, "command", settings, server=fork_server)
    command.finish()
    process = start(IN_A_NOTEBOOK, SETTINGS | settings, tmp_path, CELL)
    _, err = process.communicate(timeout=halting.SECONDS)
    assert process.returncode == 0, err
    assert (tmp_path / "cell" / METRICS).read_bytes() == (tmp_path / "command" / METRICS).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGINT, 130, "Ctrl-C: Rerun the command to resume.\n"), (signal.SIGTERM, -signal.SIGTERM, "")],
)
def test_a_signal_ends_the_fit_of_a_base_policy(
    fork_server: ForkServer, tmp_path: Path, caches: dict[str, Path], number: signal.Signals, code: int, message: str
):
    fit = {"base.clean_steps": 10**6, "base.cache_dir": tmp_path / "base", "workdir": tmp_path / "run"}
    flags, log, errors = as_flags(SETTINGS | caches | fit), tmp_path / "log", tmp_path / "errors"
    fork_server.start("poly_epo_jax.main", ["--config=configs/polynomial.py", *flags], log, errors)
    asyncio.run(until(lambda: log.exists() and "base policy, demonstrations 1/1000000" in log.read_text()))
    fork_server.send_signal(number)
    assert fork_server.wait(halting.SECONDS) == code and errors.read_text().endswith(message)
    assert [path.suffix for path in (tmp_path / "base").iterdir()] == [".lock"]
    assert not (tmp_path / "run/checkpoints").exists()


KEPT_EXCEPTIONS = """
import json, os, signal, traceback
from contextlib import nullcontext
from unittest import mock
import jax
from poly_epo_jax import get_config, run
from poly_epo_jax.records.tracking import Tracker

def interrupt(*arguments, **keywords):
    os.kill(os.getpid(), signal.SIGINT)

def interrupt_step(step):
    # Interrupts the step after its metrics were written.
    def log(self, number, metrics):
        write(self, number, metrics)
        if number == step:
            interrupt()
    write = Tracker.log
    return mock.patch.object(Tracker, "log", log)

def fails(name, error):
    def fail(*arguments, **keywords):
        raise error
    return mock.patch(name, fail)

def cell(name, steps=3, patch=nullcontext(), **changes):
    config = get_config()
    config.workdir, config.train.num_steps = name, steps
    config.base.update(changes)
    try:
        with patch:
            run(config)
    except BaseException as error:
        sys.last_value = error  # IPython keeps the last exception
        text = "".join(traceback.format_exception(error))
    else:
        text = ""
    print(json.dumps([name, sum(array.nbytes for array in jax.live_arrays()), text]), flush=True)

async def notebook():
    first_step = mock.patch("poly_epo_jax.startup.base_policy.check_finite", interrupt)
    cell("fitting", patch=first_step, clean_steps=10**6, cache_dir="base")
    cell("training", 10_000, patch=interrupt_step(3))
    cell("grading", patch=fails("poly_epo_jax.rollouts.rounds.grade_groups", RuntimeError("while grading")))
    cell("update", patch=fails("poly_epo_jax.train.check_finite", ValueError("after the update")))
    cell("saving", patch=fails("poly_epo_jax.model.checkpoint.Checkpoints.save", OSError("while saving")))
    cell("complete", 2)

asyncio.new_event_loop().run_until_complete(notebook())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("default_signals")
def test_the_training_state_is_freed_although_a_notebook_keeps_the_exception(tmp_path: Path, caches: dict[str, Path]):
    process = start(KEPT_EXCEPTIONS, SETTINGS | caches | {"eval.every": 0}, tmp_path)
    out, err = process.communicate(timeout=halting.SECONDS)
    assert process.returncode == 0 and "Ctrl-C: Saved after step 3." in err, err
    found = {name: (live, text) for name, live, text in (json.loads(row) for row in out.splitlines() if row[0] == "[")}
    last_lines = {name: text.rstrip().rpartition("\n")[2] for name, (_, text) in found.items()}
    assert last_lines == {
        "fitting": "KeyboardInterrupt",
        "training": "KeyboardInterrupt",
        "grading": "RuntimeError: while grading",
        "update": "ValueError: after the update",
        "saving": "OSError: while saving",
        "complete": "",
    }
    assert ", in _make\n" in found["fitting"][1] and ", in step\n" in found["update"][1]  # the whole traceback
    assert [path.suffix for path in (tmp_path / "base").iterdir()] == [".lock"]
    assert not (tmp_path / "fitting/checkpoints").exists() and any((tmp_path / "training/checkpoints").glob("[0-9]*"))
    num_bytes = {name: live for name, (live, _) in found.items()}
    assert max(num_bytes.values()) < 1000, num_bytes  # the weights have 40 kB, the training state 120 kB


def test_an_event_loop_in_another_thread_can_be_stopped():
    """It does not receive signals, and does not change the handlers of the main thread."""
    stop, before, stopped_by = StopSignal(), signal.getsignal(signal.SIGTERM), []

    async def main() -> None:
        with stop.on_signals():
            assert signal.getsignal(signal.SIGTERM) == before
            try:
                await stop.run_interruptible(asyncio.sleep(1000))
            except Stopped as stopped:
                stopped_by.append(str(stopped))

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    stop.request(signal.SIGINT)
    thread.join(halting.SECONDS)
    assert stopped_by == ["Ctrl-C"]
    stop.request(signal.SIGINT)  # has no effect after the loop has ended
