"""A run is only resumed with the user's code that it was started with, unless its changes are accepted."""

import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from poly_epo_jax.config.keys import AlgoSection, Config, ConfigError, TaskSection
from poly_epo_jax.records import run_folder
from poly_epo_jax.set_rl import OBJECTIVES, Objective
from poly_epo_jax.startup.config_file import load_config
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.startup.resume_code import check_resume_code, code_files
from poly_epo_jax.tasks import TASKS, PolynomialTask
from poly_epo_jax.types import Reward

OWN = """
from own_bonus import BONUS
from poly_epo_jax.config import default
from poly_epo_jax.tasks import TASKS, PolynomialTask

class Own(PolynomialTask):
    def reward(self, problem, generation):
        return super().reward(problem, generation) * BONUS

TASKS["own_for_resume"] = Own

def get_config(config_string=""):
    config = default.get_config(config_string)
    config.task.name = "own_for_resume"
    return config
"""
STEP = 3

LIBRARY = """
import functools
from poly_epo_jax.tasks import PolynomialTask

class Base(PolynomialTask):
    def reward(self, problem, generation):
        return 0.5 * super().reward(problem, generation)

def mean(rewards):
    return rewards.mean(-1)

class Mean:
    def __call__(self, rewards):
        return rewards.mean(-1)

def decorator(function):
    return functools.wraps(function)(lambda *arguments: function(*arguments) / 2)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Folder with a configuration file that defines a task, and with a module that it imports."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own_config.py").write_text(OWN)
    (folder / "own_bonus.py").write_text("BONUS = 0.5\n")
    monkeypatch.syspath_prepend(folder)
    yield folder
    TASKS.pop("own_for_resume", None)
    sys.modules.pop("own_bonus", None)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A user's module in another folder than the code that uses it."""
    (tmp_path / "library_for_resume.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("library_for_resume")
    sys.modules.pop("library_for_resume")


def configured(own: Path, **checkpoint: bool) -> Config:
    config = load_config(str(own / "own_config.py"))
    config.workdir = str(own.parent / "run")
    config.checkpoint.update(checkpoint)
    return read_config(config)


def start(config: Config) -> None:
    """Writes the files of a run that has been saved after a step."""
    folder, about = Path(config.workdir), check_resume_code(config)
    (folder / run_folder.CHECKPOINTS / str(STEP)).mkdir(parents=True)
    for name, content in {
        run_folder.CONFIG: config.to_dict(),
        run_folder.ABOUT: about,
        run_folder.METRICS: {},
    }.items():
        (folder / name).write_text(json.dumps(content))


def test_files_of_a_run(own: Path):
    assert [file.name for file in code_files(configured(own))] == ["own_bonus.py", "own_config.py"]
    assert code_files(Config()) == []


def local_mean(rewards: Any) -> Any:
    return rewards.mean(-1)


@pytest.mark.parametrize(
    "make_score",
    [
        lambda library: jax.jit(library.mean),
        lambda library: jax.custom_jvp(functools.partial(jax.jit(library.mean))),
        lambda library: functools.cache(library.mean),
        lambda library: library.decorator(local_mean),
        lambda library: library.Mean(),
        lambda library: library.Mean().__call__,
    ],
    ids=["jit", "custom_jvp", "cache", "decorator", "instance", "method"],
)
def test_files_of_objectives_that_are_no_plain_functions(
    library: Any, make_score: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(OBJECTIVES, "mean_for_resume", Objective(make_score(library), title="Mean"))
    files = code_files(Config(algo=AlgoSection(objective="mean_for_resume")))
    assert Path(library.__file__) in files and not any("site-packages" in file.parts for file in files)


def test_files_of_base_classes_and_of_rewards_of_tasks(library: Any, monkeypatch: pytest.MonkeyPatch):
    class Inherits(library.Base):
        correct_from = 0.5

    class Measures(PolynomialTask):
        rewards = (Reward(library.Mean()),)

    for task in (Inherits, Measures):
        monkeypatch.setitem(TASKS, task.__name__, task)
        files = code_files(Config(task=TaskSection(name=task.__name__)))
        assert {Path(library.__file__), Path(__file__)} <= {*files}


@pytest.mark.parametrize(("file", "old", "new"), [("own_config.py", "* BONUS", "* 0"), ("own_bonus.py", "0.5", "1.0")])
def test_a_changed_reward_is_named_and_can_be_accepted(own: Path, file: str, old: str, new: str):
    config = configured(own)
    start(config)
    check_resume_code(config)
    edited = own / file
    edited.write_text(edited.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=rf": {file}\. .*accept_changed_code"):
        check_resume_code(config)
    about = check_resume_code(configured(own, accept_changed_code=True))
    assert about["code_changes"] == [{"step": STEP, "files": [file]}]
    # After the change has been recorded, the run continues without the key.
    (Path(config.workdir) / run_folder.ABOUT).write_text(json.dumps(about))
    assert check_resume_code(config) == about
