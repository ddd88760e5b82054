"""Tests that the notebooks run, and that their stored outputs are those of their code."""

import base64
import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
from test_from_python import IN_A_NOTEBOOK, start
from training_runs import SETTINGS, environment

from poly_epo_jax.records.run_folder import read_method

ROOT = Path(__file__).parents[2]
METHODS = ("grpo", "poly_epo")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BASE_PACKAGES = """
import sys

class OnlyBasePackages:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("matplotlib", "flax", "optax", "ml_collections", "transformers"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, OnlyBasePackages())
"""
"""Makes the packages of the extra `train` unavailable."""


def cells_of(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def code_of(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in cells_of(path)]


def printed(cell: dict) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_belong_to_the_code(path: Path):
    spec = importlib.util.spec_from_file_location("execute", ROOT / "notebooks" / "execute.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    notebook = json.loads(path.read_text())
    assert notebook["metadata"]["code_sha256"] == module.code_digest(notebook["cells"]), (
        "run `python notebooks/execute.py` after changes of code cells"
    )
    cells = cells_of(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    pictures = [
        output["data"]["image/png"]
        for cell in cells
        for output in cell["outputs"]
        if "image/png" in output.get("data", {})
    ]
    assert pictures and all(matplotlib.image.imread(io.BytesIO(base64.b64decode(picture))).size for picture in pictures)
    assert path.stat().st_size < 300_000 and str(ROOT) not in path.read_text() and "/tmp/" not in path.read_text()


# A machine without the package. The folder of the clone is not the package, although it has the same name.
INSTALL = """
import importlib.machinery, importlib.util, os, subprocess, sys
importlib.util.find_spec = lambda name: importlib.machinery.PathFinder.find_spec(name, [os.getcwd()])
subprocess.run = lambda command, check: print(command[-1])
exec(sys.argv[1])
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("folder", ["poly_epo_jax/notebooks", ".", "elsewhere"])
def test_the_first_cell_installs_the_clone(path: Path, folder: str, tmp_path: Path):
    clone = tmp_path / "poly_epo_jax"
    for name in ("poly_epo_jax/notebooks", "poly_epo_jax/poly_epo_jax", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (clone / "poly_epo_jax" / "__init__.py").touch()
    command = [sys.executable, "-I", "-c", INSTALL, code_of(path)[0]]
    ended = subprocess.run(command, cwd=tmp_path / folder, capture_output=True, text=True)
    if folder != "elsewhere":
        assert ended.stdout.startswith(str(clone.resolve())) and ended.returncode == 0, ended.stderr
    else:
        assert "git+https://" in ended.stdout or "clone the repository first" in ended.stderr


@pytest.mark.slow
def test_the_outputs_of_the_advantages_notebook_are_reproduced_with_the_base_packages(tmp_path: Path):
    path = ROOT / "notebooks" / "advantages.ipynb"
    code = [f"print('<<{i}>>')\n{source}" for i, source in enumerate(code_of(path))]
    done = subprocess.run(
        [sys.executable, "-c", BASE_PACKAGES + "\n".join(code)],
        cwd=tmp_path,
        env=environment(path=ROOT),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    outputs = re.split(r"<<\d+>>\n", done.stdout)[1:]
    for cell, output in zip(cells_of(path), outputs, strict=True):
        if "Install matplotlib" not in output:
            assert printed(cell) == output


EACH_CHANGE = """
import json, sys

for before, after in json.loads(sys.argv[2]):
    assert sys.argv[1].count(before) == 1, before
    print(f"{before} becomes {after}", file=sys.stderr)
    exec(sys.argv[1].replace(before, after), {"__name__": "__main__"})
"""


@pytest.mark.slow
def test_the_changes_that_the_advantages_notebook_suggests(tmp_path: Path):
    changes = [
        ("[[1, 1, 1, 1, 1, 1, 0, 0]]", "[[0] * 8]"),
        ('["A", "A", "A", "A", "A", "B", "A", "C"]', '["A"] * 8'),
        ('["A", "A", "A", "A", "A", "B", "A", "C"]', 'list("ABCDEFGH")'),
        ("set_size = 4", "set_size = 2"),
    ]
    code = "\n".join(code_of(ROOT / "notebooks" / "advantages.ipynb"))
    variables = environment(path=ROOT) | {"MPLBACKEND": "agg"}
    command = [sys.executable, "-c", EACH_CHANGE, code, json.dumps(changes)]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" becomes ") == len(changes)


@pytest.mark.slow
def test_the_quick_start_notebook(tmp_path: Path, caches: dict[str, Path]):
    code = code_of(ROOT / "notebooks" / "quickstart.ipynb")
    cells = [source.replace("NUM_STEPS = 30", "NUM_STEPS = 2") for source in code]
    assert cells != code
    process = start(IN_A_NOTEBOOK, SETTINGS | caches, tmp_path, *cells)
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    folders = ("poly_epo", "grpo", "mostly_correct")
    assert [read_method(tmp_path / "runs/notebook-2" / name) for name in folders] == [
        "Poly-EPO",
        "GRPO",
        "Mostly correct",
    ]
    assert "--- GRPO" in out and re.search(r"^   \d x  .* (correct|incorrect)$", out, re.MULTILINE)


@pytest.mark.slow
def test_the_notebook_of_accelerators_with_the_tiny_policy(tmp_path: Path, caches: dict[str, Path]):
    cells = code_of(ROOT / "notebooks" / "free_accelerators.ipynb")
    code = "\n".join(cells)
    small = {key: value for key, value in SETTINGS.items() if key != "task.options"} | caches
    for before, after in {
        '"polynomial", "polynomial", 40, 20': '"polynomial", "polynomial", 4, 2',
        'settings = {"optimizer.learning_rate": 1e-3}': f"settings = { ({key: str(small[key]) for key in small})!r}",
    }.items():
        assert code.count(before) == 1
        code = code.replace(before, after)
    (checks,) = (cell for cell in cells if 'run("doctor"' in cell)
    for session in (code, code.replace(checks, "")):  # the second session resumes the first, without its checks
        process = start(IN_A_NOTEBOOK, SETTINGS, tmp_path, session)
        out, err = process.communicate(timeout=900)
        assert process.returncode == 0, err
        assert ("0 failed" in out) == (session == code)
        assert re.search(r"pass@64 +GRPO \S+ .* Poly-EPO .* difference [+-]", out), out
        assert "Warning" not in out + err
    folder = tmp_path / "runs/accelerator/seed-0"
    configs = [json.loads((folder / name / "config.json").read_text()) for name in METHODS]
    assert [config["algo"]["advantages"] for config in configs] == ["grpo", "marginal_set"]
    assert configs[0]["seed"] == configs[1]["seed"]
    kept = {path.parent.name for path in (folder / "models").glob("*/config.json")}
    assert kept == {*METHODS} and not [*folder.glob("*/checkpoints")]
    rate = ("settings |= {", 'settings |= {"optimizer.learning_rate": 0.5, ')
    process = start(IN_A_NOTEBOOK, SETTINGS, tmp_path, code.replace(*rate, 1).replace(checks, ""))
    assert "results with other settings" in process.communicate(timeout=900)[1] and process.returncode
