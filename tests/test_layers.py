"""Imports point down only: a module knows the floors below its own, and its own package."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "poly_epo_jax"
NAME = PACKAGE.name
FLOORS = (
    {"types", "config", "clock", "servers", "hosts", "devices", "presets"},
    {"set_rl", "model", "metrics", "batching", "data", "command_line", "default_config"},
    {"rollouts", "judges", "tasks", "checkpoint", "tracking", "update"}
    | {"grading", "algorithm", "policy", "tokenizer", "figures", "evaluation_figures", "timeline_figures"}
    | {"ceilings", "plan"},
    {"base_policy", "heldout", "experience", "records", "train", "benchmarks", "evaluation", "trained_policy"}
    | {"choices", "stages", "plan_tables"}
    | {"report_data", "report_samples", "report_charts", "report_page"},
    {"main", "report", "export", "frontier", "evaluate", "bench"},
)
SIDEWAYS = {
    ("clock", "types"),
    ("evaluation_figures", "figures"),
    ("timeline_figures", "figures"),
    ("train", "heldout"),
    ("train", "experience"),
    ("train", "records"),
}
"""(who, whom) on one floor, beside the modules of one package."""

LIBRARIES = {"set_rl": {"jax", "numpy", "jaxtyping"}, "metrics": {"numpy", "jaxtyping"}}
"""All that these may import besides the standard library, so that they can be used without the rest."""

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
        elif library != NAME:
            allowed = LIBRARIES.get(own)
            if allowed is not None and library not in allowed | sys.stdlib_module_names:
                found.append(f"{module} imports {library}, but {own} needs {', '.join(sorted(allowed))} only.")
        elif module == NAME:
            found.append(f"{module} imports {imported}, but its __init__ imports nothing.")
        elif floor(other) < 0:
            found.append(f"{module} imports {imported}, which has no floor.")
        elif other != own and (own, other) not in SIDEWAYS and floor(other) >= floor(own):
            found.append(f"{module} on floor {floor(own)} imports {imported} on floor {floor(other)}.")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str):
    assert violations(module, MODULES[module].read_text()) == []


def test_floors_do_not_overlap():
    assert sum(map(len, FLOORS)) == len(set.union(*FLOORS))


def test_no_exception_outlives_its_import():
    known = {(room(module), room(name)) for module, path in MODULES.items() for name in imports(path.read_text())}
    assert known >= SIDEWAYS


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("types", "from poly_epo_jax.batching import pack", "on floor 0 imports poly_epo_jax.batching on floor 1"),
        ("set_rl.sets", "from poly_epo_jax import metrics", "on floor 1 imports poly_epo_jax.metrics on floor 1"),
        ("model.hf", "import poly_epo_jax.update", "on floor 1 imports poly_epo_jax.update on floor 2"),
        ("tasks.new", "from poly_epo_jax.judges.exact import ExactJudge", "imports poly_epo_jax.judges.exact on floor"),
        ("policy", "def f():\n    from poly_epo_jax import tokenizer", "imports poly_epo_jax.tokenizer on floor 2"),
        ("heldout", "from poly_epo_jax.train import Parts", "on floor 3 imports poly_epo_jax.train on floor 3"),
        ("export", "from poly_epo_jax.main import run", "on floor 4 imports poly_epo_jax.main on floor 4"),
        ("set_rl.losses", "import optax", "needs jax, jaxtyping, numpy only"),
        ("metrics.new", "from jax import numpy", "imports jax, but metrics needs"),
        ("judges.new", "from . import exact", "relative name"),
        ("data", "from poly_epo_jax.utils import everything", "imports poly_epo_jax.utils, which has no floor"),
        ("utils", "import os", "poly_epo_jax.utils has no floor; add 'utils' to one of FLOORS in tests/test_layers.py"),
        ("", "from poly_epo_jax import set_rl", "its __init__ imports nothing"),
    ],
)
def test_what_must_not_be_is_found(module: str, source: str, complaint: str):
    (found,) = violations(f"{NAME}.{module}".rstrip("."), source)
    assert complaint in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("set_rl.new", "import math\nimport jax.numpy as jnp\nfrom poly_epo_jax.set_rl.sets import enumerate_sets"),
        ("tasks.new", "import anything\nfrom poly_epo_jax import set_rl\nfrom poly_epo_jax.types import Task"),
        ("main", "from poly_epo_jax.train import train\nfrom poly_epo_jax.tasks import TASKS"),
    ],
)
def test_what_may_be_is_not(module: str, source: str):
    assert violations(f"{NAME}.{module}", source) == []
