"""Tests of the registry."""

from typing import Any

import pytest

from poly_epo_jax.judges import JUDGES
from poly_epo_jax.registry import Registry


def test_a_registered_name_is_rejected():
    registry = Registry(a=1)
    registry["b"] = 2
    with pytest.raises(ValueError, match=r"'a' .* a, b\."):
        registry["a"] = 3
    assert registry == {"a": 1, "b": 2}
    del registry["a"]
    registry["a"] = 3
    assert registry["a"] == 3


CELL = """
import dataclasses
from functools import partial

def objective(rewards, scale=2.0):
    return scale * rewards

class Base:
    pass

@dataclasses.dataclass
class Task(Base):
    size: int = 4

    def __init__(self):
        super().__init__()

    @property
    def train_problems(self):
        return [self.size]

@dataclasses.dataclass(frozen=True)
class Entry:
    open: object

entries = {
    "function": objective,
    "class": Task,
    "entry": Entry(lambda task: task),
    "partial": partial(objective, scale=3.0),
    "tuple": (objective, "title"),
}
"""


def defined(cell: str) -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "cell"}
    exec(compile(cell, "cell", "exec"), found)
    return found["entries"]


def test_the_same_code_is_registered_again():
    registry = Registry(defined(CELL))
    again = defined(CELL)
    for name, entry in again.items():
        registry[name] = entry
    assert registry == again


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("function", "scale * rewards", "scale + rewards"),
        ("function", "scale=2.0)", "scale=2.5)"),
        ("class", "[self.size]", "[self.size, 1]"),
        ("class", "size: int = 4", "size: int = 5"),
        ("entry", "lambda task: task", "lambda task: None"),
        ("partial", "scale=3.0", "scale=4.0"),
        ("tuple", "scale * rewards", "scale + rewards"),
    ],
)
def test_other_code_under_the_same_name_is_rejected(name: str, before: str, after: str):
    registry, other = Registry(defined(CELL)), defined(CELL.replace(before, after))
    with pytest.raises(ValueError, match=name):
        registry[name] = other[name]


def test_judges_are_a_registry():
    assert isinstance(JUDGES, Registry)
