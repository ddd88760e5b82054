"""Imports only point down: a room, or a file in the root, imports those before it in LAYERS, and itself.

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

PACKAGE = Path(__file__).parents[2] / "poly_epo_jax"
NAME = PACKAGE.name
LAYERS = (
    "types",
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
    "evaluate",
    "report",
    "export",
    "bench",
    "doctor",
    "study",
    "main",
    "from_python",
)
"""The rooms and the files in the root of the package, from the bottom up."""
FRONT = "from_python"
"""What the package itself names, and loads when it is asked for it."""

LIBRARIES = {
    "system": {"httpx"},
    "set_rl": {"jax", "numpy", "jaxtyping"},
    "metrics": {"numpy", "scipy", "jaxtyping"},
}
"""All that these may import besides the standard library, so that they can be used without the rest."""

OPTIONAL = {
    "rollouts.jetstream.mended": {"jetstream"},
    "rollouts.servers.weight_sync": {"torch"},
    "records.tracking": {"wandb"},
}
"""What these alone import, though a plain installation does not bring it: they do without, or say what to install."""

DISTRIBUTIONS = {"orbax": "orbax-checkpoint"}
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


def layer(name: str) -> int:
    """Counted from 0; -1 for a room that has none."""
    return LAYERS.index(name) if name in LAYERS else -1


def violations(module: str, source: str) -> list[str]:
    """A sentence for each import that the module must not have."""
    own, found = room(module), []
    if module != NAME and layer(own) < 0:
        return [f"{module} has no layer; add {own!r} to LAYERS in tests/repository/test_layers.py."]
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
        elif layer(other) < 0:
            found.append(f"{module} imports {imported}, which has no layer.")
        elif layer(other) > layer(own):
            found.append(f"{module} imports {imported}, but {own} is below {other}.")
    found += [f"{module} uses {name}, which hides what it imports." for name in HIDING if name in names(source)]
    if "__file__" in names(re.sub(r"Path\(__file__\)\.with_name\(\"\w+\.\w+\"\)", "None", source)):
        found.append(f"{module} uses __file__ for more than a neighbour, Path(__file__).with_name; it stands alone.")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str):
    assert violations(module, MODULES[module].read_text()) == []


def test_layers_are_the_rooms_and_files_of_the_package():
    assert len(LAYERS) == len(set(LAYERS))
    assert set(LAYERS) == {room(module) for module in MODULES} - {""}


def test_no_exception_outlives_its_import():
    known = {(module, name) for module, path in MODULES.items() for name in imports(path.read_text())}
    optional = {(f"{NAME}.{module}", library) for module, libraries in OPTIONAL.items() for library in libraries}
    assert {(module, name.split(".")[0]) for module, name in known} >= optional


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("types", "from poly_epo_jax.config.keys import Config", "but types is below config"),
        ("set_rl.sets", "from poly_epo_jax import metrics", "but set_rl is below metrics"),
        ("model.hf", "import poly_epo_jax.step.update", "but model is below step"),
        ("judges.new", "from poly_epo_jax.tasks.math import Math", "but judges is below tasks"),
        ("step.update", "def f():\n    from poly_epo_jax import startup", "but step is below startup"),
        ("experience", "from poly_epo_jax.train import Parts", "but experience is below train"),
        ("export.card", "from poly_epo_jax.main import run", "but export is below main"),
        ("system.new", "import jax", "imports jax, but system needs httpx only"),
        ("set_rl.losses", "import optax", "needs jax, jaxtyping, numpy only"),
        ("metrics.new", "from jax import numpy", "imports jax, but metrics needs"),
        ("judges.new", "from . import exact", "relative name"),
        ("tasks.math", "from poly_epo_jax.utils import everything", "imports poly_epo_jax.utils, which has no layer"),
        (
            "utils",
            "import os",
            "poly_epo_jax.utils has no layer; add 'utils' to LAYERS in tests/repository/test_layers.py",
        ),
        ("", "from poly_epo_jax import set_rl", "its __init__ imports nothing"),
        ("bench.new", "from configs.polaris import get_config", "imports configs, which install_requires of setup.py"),
        ("export.new", "import torch", "imports torch, which install_requires of setup.py does not declare"),
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
        ("evaluate.new", "from orbax import checkpoint\nimport math"),
        ("records.tracking", "def f():\n    import wandb"),
        ("tasks.new", 'WORKER = Path(__file__).with_name("worker.py")'),
        ("main", "from poly_epo_jax.train import train\nfrom poly_epo_jax.tasks import TASKS"),
    ],
)
def test_what_may_be_is_not(module: str, source: str):
    assert violations(f"{NAME}.{module}", source) == []
