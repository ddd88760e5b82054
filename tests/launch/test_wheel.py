"""Tests that the package works when installed from a wheel, in a folder outside the repository.

Two installations are tested: with the extra `train`, and without extras. Both hide all other packages of the
environment that runs these tests. launch/package.sh downloads the packages of an installation without extras.
"""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from extending import FILES
from test_documents import commands_in, rule_of
from training_runs import SETTINGS, as_flags, environment, rows_of
from user_packages import PROJECT, user_variables

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
TASK = f"--config.task.options={SETTINGS['task.options']}"
# The objective only rewards sets of correct responses, so sets are small and the base policy is often correct.
SMALL = SETTINGS | {
    "algo.set_size": 2,
    "base.clean_steps": 300,
    "base.batch_size": 16,
    "train.num_steps": 2,
    "eval.every": 0,
}
RECIPES = {"configs": "poly_epo_jax/recipes", "studies": "poly_epo_jax/recipes/studies"}
"""Folders of the repository and their place in the wheel."""
OMITTED = re.compile(r"tests/|fuzz/|benchmarks/|\.")
"""Beginnings of the files that the source distribution omits."""

README = list(dict.fromkeys(commands_in((ROOT / "README.md").read_text())))
ELSEWHERE = {
    "bash launch/": "script of the repository",
    "cd ": "folder of the repository",
    "git clone": "downloads the repository",
    "pip install": "launch/package.sh, and tests/repository/test_documents.py",
    "source ": "environment that a script of the repository creates",
}
"""Beginnings of README commands that require more than the wheel, with the reason or the test that runs them."""
HERE = [
    line
    for line in README
    if not line.startswith(tuple(ELSEWHERE)) and not ((rule := rule_of(line)) and rule.elsewhere)
]
COMMANDS = ("bench", "doctor", "evaluate", "export", "main", "report", "study")

Shell = Callable[..., tuple[int, str]]

pytestmark = pytest.mark.slow


def run(command: list[str], folder: Path) -> None:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]


def tracked(*folders: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def build_wheel(tree: Path, folder: Path) -> Path:
    run([*PIP, "wheel", ".", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(folder)], tree)
    (found,) = folder.glob("poly_epo_jax-*.whl")
    return found


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the tracked files, so that build files of the repository cannot affect the distributions."""
    tree = tmp_path_factory.mktemp("tree")
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tree, tmp_path_factory.mktemp("wheel"))


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
def shell(installed: Path, home: Path) -> Shell:
    """Returns a function that runs a command in the folder `home` with the installed package and one extra.

    The function returns the exit code and the output.
    """

    def run_command(command: str, extra: str = "train") -> tuple[int, str]:
        variables = environment() | user_variables(path=str(installed), extra=extra) | {"HF_HUB_OFFLINE": "1"}
        variables["JAX_COMPILATION_CACHE_DIR"] = str(installed / "compiled")
        variables["PATH"] = f"{installed / 'bin'}:{Path(sys.executable).parent}:{variables['PATH']}"
        ended = subprocess.run(
            ["timeout", "300", "bash", "-c", command],
            cwd=home,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return ended.returncode, ended.stdout

    return run_command


@pytest.fixture(scope="module")
def works(shell: Shell) -> Callable[..., str]:
    """Returns a function that runs a command like `shell`, checks that it succeeds, and returns its output."""

    def run_command(command: str, extra: str = "train") -> str:
        code, output = shell(command, extra)
        assert code == 0, output[-3000:]
        return output

    return run_command


@pytest.fixture(scope="module")
def trained(works: Callable[..., str], home: Path) -> Path:
    """Trains for two steps and returns the run folder."""
    flags = " ".join(f'"{flag}"' for flag in as_flags(SMALL))
    works(f"python -m poly_epo_jax.main --config=my_objective.py {flags}")
    return home / "runs" / "my-objective"


def test_the_wheel_contains_only_the_package_and_the_recipes(wheel: Path):
    recipes = {f"{place}/{Path(name).name}" for folder, place in RECIPES.items() for name in tracked(folder)}
    names = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert names == {*tracked("poly_epo_jax"), *recipes}


def test_the_source_distribution_builds_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path):
    """The source distribution contains all files that users need, without the tests."""
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run([sys.executable, "-c", code], tree)
    (found,) = tmp_path.glob("poly_epo_jax-*.tar.gz")
    with tarfile.open(found) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    names = {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and "egg-info" not in str(path)
    }
    assert names - {"PKG-INFO", "setup.cfg"} == {name for name in tracked() if not OMITTED.match(name)}
    assert contents(build_wheel(folder, tmp_path)) == contents(wheel)


def test_the_long_description_is_the_readme_with_absolute_links(wheel: Path):
    (metadata,) = (text for name, text in contents(wheel).items() if name.endswith("/METADATA"))
    message = email.message_from_bytes(metadata)
    assert message["Name"] == PROJECT["name"] and message["Version"] == PROJECT["version"]
    text, start = metadata.decode().partition("\n\n")[2], f"{PROJECT['urls']['Repository']}/"
    links = re.findall(r'(?:\]\(|(?:src|href|srcset)=")(?!#)([^)"\s]+)', text)
    assert all(re.match(r"(https?|mailto):", link) for link in links)
    files = re.compile(re.escape(start) + rf"(?:blob|raw)/v{re.escape(PROJECT['version'])}/([^#]+)")
    named = [found[1] for link in links if (found := files.match(link))]
    assert named and [name for name in named if not (ROOT / name).exists()] == []
    assert (
        re.sub(re.escape(start) + r"(blob|raw)/v[^/]+/", "", text).strip() == (ROOT / "README.md").read_text().strip()
    )


def test_the_package_is_imported_from_the_wheel_and_the_repository_is_not_importable(
    works: Callable[..., str], installed: Path
):
    code = "import importlib.util, poly_epo_jax; print(poly_epo_jax.__file__, importlib.util.find_spec('configs'))"
    assert works(f'python -c "{code}"').split() == [str(installed / "poly_epo_jax" / "__init__.py"), "None"]


def test_the_documented_objective_trains(trained: Path):
    rows = rows_of(trained)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["policy/update_norm"] > 0 for row in rows)
    assert '"objective": "all_correct_and_distinct"' in (trained / "config.json").read_text()


def test_the_run_is_evaluated_reported_and_exported(trained: Path, works: Callable[..., str], home: Path):
    models = "--models=mine=runs/my-objective --benchmarks=polynomial --num_generations=8"
    works(f'python -m poly_epo_jax.evaluate --config=my_objective.py "{TASK}" {models}')
    works("python -m poly_epo_jax.report runs/my-objective runs/evaluation")
    assert (home / "runs" / "report" / "report.html").stat().st_size > 50_000  # includes styles, scripts and data
    works("python -m poly_epo_jax.export runs/my-objective policy")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (home / "policy").iterdir()}


@pytest.mark.parametrize("command", HERE)
def test_commands_of_the_readme(command: str, shell: Shell):
    """Without the repository, recipes and studies are selected by name instead of by path.

    The commands run in the order of the README: the report reads the runs that the commands before it train.
    """
    rule = rule_of(command)
    assert rule, "no rule in RULES of tests/repository/test_documents.py"
    by_name = re.sub(r"(?:configs|studies)/(\w+)\.py", r"\1", command)
    code, output = shell(f"{by_name} {rule.flags}")
    assert "Traceback" not in output and code == int(bool(rule.error)), output[-3000:]
    assert (rule.error or rule.says) in output, output[-3000:]


def test_all_reasons_are_used():
    used = {start for start in ELSEWHERE for line in README if line.startswith(start)}
    assert used == set(ELSEWHERE)


def test_the_base_installation(works: Callable[..., str]):
    assert works("poly-epo --version", "").split()[-1] == PROJECT["version"]
    listed = works("poly-epo recipes", "")
    assert [name for folder in RECIPES for name in tracked(folder) if Path(name).stem not in listed] == []
    assert works("poly-epo recipes show smollm2", "") == (ROOT / "configs" / "smollm2.py").read_text()
    assert "Poly-EPO" in works("poly-epo explain --rewards 1,1,0,0 --strategies A,B,A,C --set_size 2", "")
    code = "from poly_epo_jax import set_rl; print(set_rl.polychromic_advantages([[1, 1, 0]], [[1, 2, 1]], 2).shape)"
    assert works(f'python -c "{code}"', "") == "(1, 3)\n"


@pytest.mark.parametrize(
    "command",
    [*(f"python -m poly_epo_jax.{name}" for name in COMMANDS), "poly-epo train --config=polynomial", "poly-epo study"],
)
def test_a_command_whose_packages_are_missing(command: str, shell: Shell):
    code, output = shell(command, "")
    assert code != 0 and output.count("\n") == 1, output
    assert output.startswith("Error: ") and f"pip install '{PROJECT['name']}[train] @ file://" in output
