"""Tests of the registry."""

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


def test_judges_are_a_registry():
    assert isinstance(JUDGES, Registry)
