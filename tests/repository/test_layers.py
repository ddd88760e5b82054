"""Tests the import order of the package: a subpackage or root file only imports itself and those before it in LAYERS.

The package must also be self-contained: it only imports distributions that pyproject.toml declares, and does not read
files outside the package. set_rl and the start of the command line only import the base requirements.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from user_packages import requirements

PACKAGE = Path(__file__).parents[2] / "poly_epo_jax"
NAME = PACKAGE.name
LAYERS = (
    "types",
    "registry",
    "system",
    "config",
    "set_rl",
    "metrics",
    "judges",
    "tasks",
    "parallel",
    "records",
    "model",
    "rollouts",
    "step",
    "experience",
    "train",
    "memory_plan",
    "startup",
    "fit_base",
    "evaluate",
    "check_run",
    "report",
    "rejudge",
    "audit",
    "export",
    "bench",
    "doctor",
    "study",
    "accelerator",
    "main",
    "from_python",
    "cli",
    "__main__",
)
"""Subpackages and root files of the package, from lowest to highest."""
FRONT = ("from_python", "system")
"""The only modules that `__init__` imports, lazily."""

RECIPES = "config.recipes"
"""The only module that reads files elsewhere: recipes/ of the package or, in a checkout, configs/ and studies/."""

LIBRARIES = {
    "system": {"httpx"},
    "set_rl": {"jax", "numpy", "jaxtyping"},
    "metrics": {"numpy", "scipy", "jaxtyping"},
}
"""Allowed imports of subpackages that can be used on their own, in addition to the standard library."""

OPTIONAL = {
    "rollouts.sglang.tensor_sync": {"torch"},
    "records.tracking": {"wandb", "trackio"},
    "tasks.gym_worker": {"reasoning_gym"},
    "tasks.textarena_worker": {"textarena"},
}
"""Imports that the extra `train` does not install. The modules work without them, or report how to install them."""

DISTRIBUTIONS = {"orbax": "orbax-checkpoint"}
"""Distribution names of modules with a different name."""

HIDING = ("import_module", "__import__", "spec_from_file_location")
"""Import functions that these tests cannot check."""
NEXT_TO_THE_MODULE = r"Path\(__file__\)\.(with_name\(\"\w+\.\w+\"\)|parent\.glob\(\"\*\.\w+\"\))"
"""Expressions with the only paths that may be derived from `__file__`."""

MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports(source: str) -> Iterator[str]:
    """Yields the dotted names of all imports of a module, including local imports. `from a import b` may yield a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            yield from (f"{NAME}.{alias.name}" for alias in node.names) if origin == NAME else [origin]


def normalize(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


BASE = {normalize(requirement.name) for requirement in requirements()}
"""Distributions of an installation without extras."""

DECLARED = BASE | {normalize(requirement.name) for requirement in requirements("train")}
"""Distributions of an installation that can train."""


def names(source: str) -> set[str]:
    """Returns all names and attributes that occur in a module."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {node.id for node in nodes if isinstance(node, ast.Name)}
    return plain | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def room(module: str) -> str:
    """Returns the subpackage or root file of a module, such as `model` for poly_epo_jax.model.hf."""
    return [*module.split("."), ""][1]


def layer(name: str) -> int:
    """Returns the index in LAYERS, or -1 if it is missing."""
    return LAYERS.index(name) if name in LAYERS else -1


class _AtImport(ast.NodeTransformer):
    """Removes the code that importing a module does not execute: functions, and imports for type checkers."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        del node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        del node

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def imported_with(module: str) -> tuple[set[str], set[str]]:
    """Returns the modules of the package that importing a module executes, and the libraries that they import."""
    waiting, own, others = [module], set[str](), set[str]()
    while waiting:
        name = waiting.pop()
        if name in own:
            continue
        if name not in MODULES:
            if name.split(".")[0] != NAME:
                others.add(name.split(".")[0])
            continue
        own.add(name)
        waiting.append(name.rpartition(".")[0] or NAME)
        for node in ast.walk(_AtImport().visit(ast.parse(MODULES[name].read_text()))):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return own, others - sys.stdlib_module_names


def violations(module: str, source: str) -> list[str]:
    """Returns an error message for each violation in the source of a module."""
    own, found = room(module), []
    if module != NAME and layer(own) < 0:
        return [f"{module} has no layer; add {own!r} to LAYERS in tests/repository/test_layers.py."]
    for imported in imports(source):
        library, other = imported.split(".")[0], room(imported)
        if imported.startswith("."):
            found.append(f"{module} imports {imported}, a relative name; use an absolute import from {NAME}.")
        elif library in sys.stdlib_module_names:
            continue
        elif library != NAME:
            allowed, optional = LIBRARIES.get(own), OPTIONAL.get(module.removeprefix(f"{NAME}."), set())
            if allowed is not None and library not in allowed:
                found.append(f"{module} imports {library}, but {own} may only import {', '.join(sorted(allowed))}.")
            elif library not in optional and normalize(DISTRIBUTIONS.get(library, library)) not in DECLARED:
                found.append(f"{module} imports {library}, which pyproject.toml does not declare for the extra train.")
        elif module == NAME:
            if other not in FRONT:
                found.append(f"{module} imports {imported}, but __init__ may only import {' and '.join(FRONT)}.")
        elif layer(other) < 0:
            found.append(f"{module} imports {imported}, which has no layer.")
        elif layer(other) > layer(own):
            found.append(f"{module} imports {imported}, but {own} is below {other}.")
    found += [f"{module} uses {name}, which hides imports from this test." for name in HIDING if name in names(source)]
    is_outside = "__file__" in names(re.sub(NEXT_TO_THE_MODULE, "None", source))
    if is_outside and module != f"{NAME}.{RECIPES}":
        found.append(f"{module} uses __file__ other than in {NEXT_TO_THE_MODULE}; only read files next to the module.")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_layers(module: str):
    assert violations(module, MODULES[module].read_text()) == []


def test_layers_are_the_rooms_and_files_of_the_package():
    assert len(LAYERS) == len(set(LAYERS))
    assert set(LAYERS) == {room(module) for module in MODULES} - {""}


@pytest.mark.parametrize("module", [f"{NAME}.set_rl", f"{NAME}.cli", f"{NAME}.cli.explain", f"{NAME}.__main__"])
def test_the_base_requirements_are_sufficient(module: str):
    own, others = imported_with(module)
    assert module in own and {normalize(other) for other in others} <= BASE


def test_judges_require_httpx_in_addition():
    _, others = imported_with(f"{NAME}.judges")
    extra = {normalize(requirement.name) for requirement in requirements("judge")}
    assert {normalize(other) for other in others} - BASE == extra - BASE == {"httpx"}


def test_base_requirements_are_the_imports_of_set_rl():
    assert LIBRARIES["set_rl"] == BASE


def test_parent_packages_and_libraries_are_found_with_a_module():
    own, others = imported_with(f"{NAME}.report.figures")
    assert {f"{NAME}.report", f"{NAME}.types"} < own and "matplotlib" in others


def test_all_optional_imports_are_used():
    known = {(module, name) for module, path in MODULES.items() for name in imports(path.read_text())}
    optional = {(f"{NAME}.{module}", library) for module, libraries in OPTIONAL.items() for library in libraries}
    assert {(module, name.split(".")[0]) for module, name in known} >= optional


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("types", "from poly_epo_jax.config.keys import Config", "but types is below config"),
        ("set_rl.sets", "from poly_epo_jax import metrics", "but set_rl is below metrics"),
        ("model.hf", "import poly_epo_jax.step.update", "but model is below step"),
        ("judges.new", "from poly_epo_jax.tasks.math import Math", "but judges is below tasks"),
        ("step.update", "def f():\n    from poly_epo_jax import startup", "but step is below startup"),
        ("experience", "from poly_epo_jax.train import Parts", "but experience is below train"),
        ("export.card", "from poly_epo_jax.main import run", "but export is below main"),
        ("main", "from poly_epo_jax.cli import main", "but main is below cli"),
        ("system.new", "import jax", "imports jax, but system may only import httpx"),
        ("set_rl.losses", "import optax", "may only import jax, jaxtyping, numpy"),
        ("metrics.new", "from jax import numpy", "imports jax, but metrics may only import"),
        ("judges.new", "from . import exact", "relative name"),
        ("tasks.math", "from poly_epo_jax.utils import everything", "imports poly_epo_jax.utils, which has no layer"),
        (
            "utils",
            "import os",
            "poly_epo_jax.utils has no layer; add 'utils' to LAYERS in tests/repository/test_layers.py",
        ),
        ("", "from poly_epo_jax import set_rl", "__init__ may only import"),
        (
            "bench.new",
            "from configs.polaris import get_config",
            "imports configs, which pyproject.toml does not declare",
        ),
        ("export.new", "import torch", "imports torch, which pyproject.toml does not declare"),
        ("model.hf", "import os, jetstream", "imports jetstream, which pyproject.toml does not declare"),
        ("main", "def f():\n    importlib.import_module('configs')", "uses import_module, which hides"),
        ("report.new", "Path(__file__).parents[1] / 'docs'", "uses __file__ other than"),
        ("config.new", "Path(__file__).parents[1] / 'recipes'", "uses __file__ other than"),
        ("judges.llm", "open(poly_epo_jax.__file__)", "uses __file__ other than"),
    ],
)
def test_violations_are_reported(module: str, source: str, message: str):
    (found,) = violations(f"{NAME}.{module}".rstrip("."), source)
    assert message in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("set_rl.new", "import math\nimport jax.numpy as jnp\nfrom poly_epo_jax.set_rl.sets import enumerate_sets"),
        ("tasks.new", "import math_verify\nfrom poly_epo_jax import set_rl\nfrom poly_epo_jax.types import Task"),
        ("evaluate.new", "from orbax import checkpoint\nimport math"),
        ("records.tracking", "def f():\n    import wandb"),
        ("tasks.new", 'WORKER = Path(__file__).with_name("worker.py")'),
        ("main", "from poly_epo_jax.train import train\nfrom poly_epo_jax.tasks import TASKS"),
    ],
)
def test_allowed_imports_are_not_reported(module: str, source: str):
    assert violations(f"{NAME}.{module}", source) == []
