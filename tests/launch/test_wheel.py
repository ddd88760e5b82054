"""Tests that the package works when installed from a wheel, in a folder outside the repository."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from extending import FILES
from training_runs import SETTINGS, as_flags, environment, rows_of

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
TASK = f"--config.task.options={SETTINGS['task.options']}"
# The objective only rewards sets of correct responses, so sets are small and the base policy is often correct.
SMALL = SETTINGS | {"algo.set_size": 2, "base.clean_steps": 300, "train.num_steps": 3, "eval.every": 3}
Python = Callable[..., str]

pytestmark = pytest.mark.slow


def run(command: list[str], folder: Path, env: dict[str, str] | None = None) -> str:
    """Runs a command and returns its stdout."""
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def tracked(*folders: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a copy of the tracked files, so that build files of the repository cannot affect it."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    run([*PIP, "wheel", ".", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(folder)], tree)
    (found,) = folder.glob("poly_epo_jax-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    run([*PIP, "install", "--no-index", "--no-deps", "--target", str(folder), str(wheel)], folder)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a folder that contains only a configuration file from docs/how_to/extend.md."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "my_objective.py").write_text(FILES["my_objective.py"])
    return folder


@pytest.fixture(scope="module")
def python(installed: Path, home: Path) -> Python:
    """Returns a function that runs Python in the folder `home` with the installed package."""

    def run_python(*arguments: str) -> str:
        return run([sys.executable, *arguments], home, environment(path=installed))

    return run_python


@pytest.fixture(scope="module")
def trained(python: Python, home: Path, caches: dict[str, Path]) -> Path:
    """Trains for three steps and returns the run folder."""
    python("-m", "poly_epo_jax.main", "--config=my_objective.py", *as_flags(SMALL | caches))
    return home / "runs" / "my-objective"


def test_the_wheel_contains_only_the_package(wheel: Path):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == set(tracked("poly_epo_jax"))


def test_the_package_is_imported_from_the_wheel_and_the_repository_is_not_importable(python: Python, installed: Path):
    code = "import importlib.util, poly_epo_jax; print(poly_epo_jax.__file__, importlib.util.find_spec('configs'))"
    assert python("-c", code).split() == [str(installed / "poly_epo_jax" / "__init__.py"), "None"]


def test_the_documented_objective_trains(trained: Path):
    rows = rows_of(trained)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["policy/update_norm"] > 0 for row in rows)
    assert '"objective": "all_correct_and_distinct"' in (trained / "config.json").read_text()


def test_the_run_is_evaluated_reported_and_exported(trained: Path, python: Python, home: Path):
    models = ["--models=mine=runs/my-objective", "--benchmarks=polynomial", "--num_generations=8"]
    python("-m", "poly_epo_jax.evaluate", "--config=my_objective.py", TASK, *models)
    python("-m", "poly_epo_jax.report", "runs/my-objective", "runs/evaluation")
    assert (home / "runs" / "report" / "report.html").stat().st_size > 50_000  # includes styles, scripts and data
    python("-m", "poly_epo_jax.export", "runs/my-objective", "policy")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (home / "policy").iterdir()}


def test_memory_plan(python: Python):
    assert "Plan: 1 x cpu" in python("-m", "poly_epo_jax.bench", "--config=my_objective.py:laptop", "--plan")
