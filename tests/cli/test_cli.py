"""Types commands of `python -m poly_epo_jax` in an empty folder, with the package laid out as a wheel installs it."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import poly_epo_jax
from poly_epo_jax import cli
from poly_epo_jax.cli import COMMANDS, main
from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.config.recipes import find_file
from poly_epo_jax.system.missing_packages import explain_missing_package, install_command

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "poly_epo_jax"
HIDE = ROOT / "tests" / "support" / "user_install"
Typed = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates the folder of a wheel's packages, with links to the files of the repository."""
    folder = tmp_path_factory.mktemp("site-packages")
    recipes = folder / "poly_epo_jax" / "recipes"
    recipes.mkdir(parents=True)
    for path in (*PACKAGE.iterdir(), *ROOT.glob("configs/*.py")):
        (folder / "poly_epo_jax" / ("recipes" if path.parent.name == "configs" else "") / path.name).symlink_to(path)
    (recipes / "studies").symlink_to(ROOT / "studies")
    return folder


@pytest.fixture
def typed(installed: Path, tmp_path: Path) -> Typed:
    """Returns a function that runs Python with these arguments in an empty folder."""

    def run(*arguments: str, hidden: str = "") -> subprocess.CompletedProcess[str]:
        variables = {"PYTHONPATH": f"{HIDE}:{installed}", "POLY_EPO_HIDDEN_MODULES": hidden}
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True
        )

    return run


def test_the_help_lists_all_commands_and_imports_no_other_packages(typed: Typed):
    before = "import sys; before = set(sys.modules); from poly_epo_jax.cli import main; main(['--help']); "
    ended = typed("-c", f"{before}print(*(set(sys.modules) - before), file=sys.stderr)")
    for name, (module, purpose) in COMMANDS.items():
        assert any({name, module} <= set(line.split()) and purpose in line for line in ended.stdout.splitlines())
    imported = {name.split(".")[0] for name in ended.stderr.split()}
    assert "poly_epo_jax" in imported and imported - {"poly_epo_jax"} <= sys.stdlib_module_names


def test_without_arguments_the_help_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: poly-epo COMMAND")


def test_version(typed: Typed):
    version = importlib.metadata.version("poly_epo_jax")
    assert typed("-m", "poly_epo_jax", "--version").stdout == f"poly-epo {version}\n"
    assert poly_epo_jax.__version__ == version


def test_an_unknown_command(typed: Typed):
    ended = typed("-m", "poly_epo_jax", "trian")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("Error: poly-epo has no command trian; did you mean train?")
    assert ended.stderr.count("\n") == 1


def test_recipes(typed: Typed, installed: Path):
    listed = typed("-m", "poly_epo_jax", "recipes").stdout.splitlines()
    kinds = {"configs": installed / "poly_epo_jax/recipes", "studies": installed / "poly_epo_jax/recipes/studies"}
    for kind, folder in kinds.items():
        for path in (ROOT / kind).glob("*.py"):
            (row,) = [row for row, line in enumerate(listed) if line.strip() == str(folder / path.name)]
            name, _, title = listed[row - 1].strip().partition(" ")
            assert name == path.stem and path.read_text().startswith(f'"""{title.strip()}\n')


def test_a_recipe_is_printed_and_the_copy_is_listed(typed: Typed, tmp_path: Path):
    shown = typed("-m", "poly_epo_jax", "recipes", "show", "polynomial")
    assert shown.stdout == (ROOT / "configs/polynomial.py").read_text()
    study = typed("-m", "poly_epo_jax", "recipes", "show", "--study", "polynomial")
    assert study.stdout == (ROOT / "studies/polynomial.py").read_text()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "polynomial.py").write_text('"""My own polynomials."""\n')
    listed = typed("-m", "poly_epo_jax", "recipes").stdout.splitlines()
    assert [line.split(maxsplit=1)[1] for line in listed if line.strip().startswith("polynomial ")] == [
        "My own polynomials.",
        (ROOT / "studies/polynomial.py").read_text().splitlines()[0].removeprefix('"""'),
    ]


def test_an_unknown_recipe(typed: Typed):
    ended = typed("-m", "poly_epo_jax", "recipes", "show", "smollm")
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        "Error: There is no recipe smollm; did you mean smollm2? Recipes in configs: countdown, "
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_modules_of_the_working_folder_never_replace_packages(command: str, monkeypatch: pytest.MonkeyPatch):
    """The working folder may be the run of another person."""
    before = [*sys.path]
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "argv", sys.argv.copy())
    monkeypatch.setattr(cli, "report_missing_packages", lambda: None)
    monkeypatch.setattr(cli.runpy, "run_module", lambda module, **_: None)
    assert main([command]) == 0
    only_reads = command in ("report", "check-run", "export", "recipes", "explain")
    assert sys.path == before + ([] if only_reads else [os.getcwd()])


@pytest.mark.slow
def test_a_configuration_file_imports_modules_of_the_working_folder(typed: Typed, tmp_path: Path):
    (tmp_path / "mine.py").write_text("from local import get_config as get_config\n")
    (tmp_path / "local.py").write_text("from poly_epo_jax.config.default import get_config as get_config\n")
    # The path of a console script's folder precedes the other paths.
    script = "import sys; sys.path[0] = '/'; from poly_epo_jax.cli import main; sys.exit(main())"
    mine = typed("-c", script, "train", "--config=mine.py", "--print_config")
    assert "algo.advantages = 'marginal_set'" in mine.stdout.splitlines(), mine.stderr


def test_messages_about_unknown_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for text, message in {
        "skwed": "There is no recipe skwed; did you mean skewed? Recipes in studies: accelerator, baselines, ",
        "none": "There is no recipe none; choose a recipe, or write the path of a file, with its .py. Recipes in ",
        "none.py": "none.py is not a file; correct the path. Python files in .: none.",
        f"{tmp_path}/": f"{tmp_path}/ is not a file; correct the path. Python files in {tmp_path}: none.",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            find_file(text, "studies")


@pytest.mark.slow
def test_a_study_is_found_by_name(typed: Typed):
    ended = typed("-m", "poly_epo_jax", "study", "skewed", "--config.seed=1")
    assert ended.returncode == 2 and "seed is controlled by `seeds` of the study" in ended.stderr


def test_training_from_python_reports_missing_packages(typed: Typed):
    """tests/launch/test_wheel.py does the same for all commands."""
    ended = typed("-c", "from poly_epo_jax import run", hidden="ml_collections")
    sentence, command = explain_missing_package(ModuleNotFoundError(name="ml_collections")), install_command("train")
    assert sentence.endswith(f"(ml_collections is missing); install them with: {command}")
    # The package is not installed in the environment of the process.
    reported = f"ImportError: {sentence.removesuffix(command)}"
    assert ended.stderr.splitlines()[-1].startswith(reported) and "[train]'" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///home/a", "dir_info": {"editable": True}}, "pip install --editable '/home/a[gpu]'"),
        ({"url": "file:///a.whl", "archive_info": {}}, "pip install 'poly-epo-jax[gpu] @ file:///a.whl'"),
        (None, "pip install 'poly-epo-jax[gpu]'"),
    ],
)
def test_extras_are_installed_from_the_origin_of_the_package(origin, command, monkeypatch: pytest.MonkeyPatch):
    installed = SimpleNamespace(read_text=lambda _: json.dumps(origin) if origin else None)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: iter([installed]))
    assert install_command("gpu") == command
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: iter([]))
    assert install_command("gpu") == "pip install --editable '.[gpu]'"


def test_an_error_other_than_a_missing_package_keeps_its_traceback(typed: Typed):
    code = "from poly_epo_jax.system.missing_packages import report_missing_packages as r; r(); "
    assert "Traceback" in typed("-c", f"{code}1 / 0").stderr
    assert "(nothing_ is missing)" in typed("-c", f"{code}import nothing_.more").stderr


def test_commands_of_other_packages_keep_their_tracebacks(typed: Typed, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import poly_epo_jax")
    (tmp_path / "mine" / "train.py").write_text("import nothing_")
    ended = typed("-m", "mine.train")
    assert "Traceback" in ended.stderr and "No module named 'nothing_'" in ended.stderr
