"""A registry is a dict that does not accept a name twice."""

import pytest

from poly_epo_jax.judges import JUDGES
from poly_epo_jax.types import Registry


def test_a_name_that_is_taken_is_refused():
    parts = Registry(a=1)
    parts["b"] = 2
    with pytest.raises(ValueError, match=r"a part named 'a' already; choose another name than a, b\."):
        parts["a"] = 3
    assert parts == {"a": 1, "b": 2}
    del parts["a"]
    parts["a"] = 3
    assert parts["a"] == 3


def test_what_users_add_to_is_a_registry():
    assert isinstance(JUDGES, Registry)
