"""Imports only point down: a module knows the floors below its own, and its own package.

The package also stands alone: it imports nothing that setup.py does not declare, and reads no file outside itself.
"""

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

PACKAGE = Path(__file__).parents[1] / "poly_epo_jax"
NAME = PACKAGE.name
FLOORS = (
    {"types", "checks", "section", "registry", "http_client", "json_files", "file_lock", "daemon_thread", "first_line"}
    | {"versions", "ctrl_c"},
    {"config", "options", "digests"},
    {"parallel", "timeline", "set_rl", "metrics", "data", "batching", "run_folder", "optimizer", "features"}
    | {"stop_strings"},
    {"model", "progress", "default_config", "objective", "minibatches", "rows"},
    {"rollouts", "judges", "tasks", "checkpoint", "update", "grading", "algorithm"},
    {"base_policy", "experience", "tracking", "step_metrics", "evaluation", "policy", "choices", "memory_plan"}
    | {"same_run"},
    {"train", "command_line", "report", "prepare"},
    {"main", "export", "evaluate", "bench"},
    {"doctor", "study", "from_python"},
)
FRONT = "from_python"
"""What the package itself names, and loads when it is asked for it."""
SIDEWAYS = {("section", "checks")}
"""(who, whom) on one floor, beside the modules of one package."""

LIBRARIES = {"set_rl": {"jax", "numpy", "jaxtyping"}, "metrics": {"numpy", "jaxtyping"}}
"""All that these may import besides the standard library, so that they can be used without the rest."""

OPTIONAL = {
    "rollouts.jetstream.mended": {"jetstream"},
    "rollouts.sglang.weight_sync": {"torch"},
    "tracking": {"wandb"},
}
"""What these alone import, though a plain installation does not bring it: they do without, or say what to install."""

DISTRIBUTIONS = {"absl": "absl-py", "orbax": "orbax-checkpoint"}
"""By the name that is imported, where that is another."""

HIDING = ("import_module", "__import__", "spec_from_file_location")
"""Ways to import that would escape these tests."""

MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports(source: str) -> Iterator[str]:
    """Dotted names of what a module imports, wherever in it; what `from a import b` names may be module a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            yield from (f"{NAME}.{alias.name}" for alias in node.names) if origin == NAME else [origin]


def declared() -> set[str]:
    """The distributions of setup.py's install_requires, as `normal` writes them."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(PACKAGE.parent / "setup.py"))
    return {normal(re.split(r"[^\w.-]", requirement)[0]) for requirement in setup.call_args.kwargs["install_requires"]}


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


DECLARED = declared()


def names(source: str) -> set[str]:
    """Every name and attribute that occurs in a module."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {node.id for node in nodes if isinstance(node, ast.Name)}
    return plain | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def room(module: str) -> str:
    """The package or module directly below the top: `model` of poly_epo_jax.model.hf."""
    return [*module.split("."), ""][1]


def floor(name: str) -> int:
    """Counted from 0; -1 for a room that has none."""
    return next((number for number, rooms in enumerate(FLOORS) if name in rooms), -1)


def violations(module: str, source: str) -> list[str]:
    """A sentence for each import that the module must not have."""
    own, found = room(module), []
    if module != NAME and floor(own) < 0:
        return [f"{module} has no floor; add {own!r} to one of FLOORS in tests/test_layers.py."]
    for imported in imports(source):
        library, other = imported.split(".")[0], room(imported)
        if imported.startswith("."):
            found.append(f"{module} imports {imported}, a relative name; write it from {NAME} on.")
        elif library in sys.stdlib_module_names:
            continue
        elif library != NAME:
            allowed, optional = LIBRARIES.get(own), OPTIONAL.get(module.removeprefix(f"{NAME}."), set())
            if allowed is not None and library not in allowed:
                found.append(f"{module} imports {library}, but {own} needs {', '.join(sorted(allowed))} only.")
            elif library not in optional and normal(DISTRIBUTIONS.get(library, library)) not in DECLARED:
                found.append(f"{module} imports {library}, which install_requires of setup.py does not declare.")
        elif module == NAME:
            if other != FRONT:
                found.append(f"{module} imports {imported}, but its __init__ imports nothing but {FRONT}.")
        elif floor(other) < 0:
            found.append(f"{module} imports {imported}, which has no floor.")
        elif other != own and (own, other) not in SIDEWAYS and floor(other) >= floor(own):
            found.append(f"{module} on floor {floor(own)} imports {imported} on floor {floor(other)}.")
    found += [f"{module} uses {name}, which hides what it imports." for name in HIDING if name in names(source)]
    if "__file__" in names(re.sub(r"Path\(__file__\)\.with_name\(\"\w+\.\w+\"\)", "None", source)):
        found.append(f"{module} uses __file__ for more than a neighbour, Path(__file__).with_name; it stands alone.")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str):
    assert violations(module, MODULES[module].read_text()) == []


def test_floors_do_not_overlap():
    assert sum(map(len, FLOORS)) == len(set.union(*FLOORS))


def test_no_exception_outlives_its_import():
    known = {(module, name) for module, path in MODULES.items() for name in imports(path.read_text())}
    assert {(room(module), room(name)) for module, name in known} >= SIDEWAYS
    optional = {(f"{NAME}.{module}", library) for module, libraries in OPTIONAL.items() for library in libraries}
    assert {(module, name.split(".")[0]) for module, name in known} >= optional


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("types", "from poly_epo_jax.batching import pack", "on floor 0 imports poly_epo_jax.batching on floor 2"),
        ("set_rl.sets", "from poly_epo_jax import metrics", "on floor 2 imports poly_epo_jax.metrics on floor 2"),
        ("model.hf", "import poly_epo_jax.update", "on floor 3 imports poly_epo_jax.update on floor 4"),
        ("tasks.new", "from poly_epo_jax.judges.exact import ExactJudge", "imports poly_epo_jax.judges.exact on floor"),
        ("update", "def f():\n    from poly_epo_jax import tasks", "imports poly_epo_jax.tasks on floor 4"),
        ("experience", "from poly_epo_jax.train import Parts", "on floor 5 imports poly_epo_jax.train on floor 6"),
        ("export", "from poly_epo_jax.main import run", "on floor 7 imports poly_epo_jax.main on floor 7"),
        ("set_rl.losses", "import optax", "needs jax, jaxtyping, numpy only"),
        ("metrics.new", "from jax import numpy", "imports jax, but metrics needs"),
        ("judges.new", "from . import exact", "relative name"),
        ("data", "from poly_epo_jax.utils import everything", "imports poly_epo_jax.utils, which has no floor"),
        ("utils", "import os", "poly_epo_jax.utils has no floor; add 'utils' to one of FLOORS in tests/test_layers.py"),
        ("", "from poly_epo_jax import set_rl", "its __init__ imports nothing"),
        ("bench.new", "from configs.polaris import get_config", "imports configs, which install_requires of setup.py"),
        ("export", "import torch", "imports torch, which install_requires of setup.py does not declare"),
        ("model.hf", "import os, jetstream", "imports jetstream, which install_requires of setup.py does not declare"),
        ("main", "def f():\n    importlib.import_module('configs')", "uses import_module, which hides"),
        ("report.new", "Path(__file__).parents[1] / 'docs'", "uses __file__ for more than a neighbour"),
        ("judges.llm", "open(poly_epo_jax.__file__)", "uses __file__ for more than a neighbour"),
    ],
)
def test_what_must_not_be_is_found(module: str, source: str, complaint: str):
    (found,) = violations(f"{NAME}.{module}".rstrip("."), source)
    assert complaint in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("set_rl.new", "import math\nimport jax.numpy as jnp\nfrom poly_epo_jax.set_rl.sets import enumerate_sets"),
        ("tasks.new", "import math_verify\nfrom poly_epo_jax import set_rl\nfrom poly_epo_jax.types import Task"),
        ("evaluate", "import absl.app\nfrom orbax import checkpoint\nimport math"),
        ("tracking", "def f():\n    import wandb"),
        ("tasks.new", 'WORKER = Path(__file__).with_name("worker.py")'),
        ("main", "from poly_epo_jax.train import train\nfrom poly_epo_jax.tasks import TASKS"),
    ],
)
def test_what_may_be_is_not(module: str, source: str):
    assert violations(f"{NAME}.{module}", source) == []
