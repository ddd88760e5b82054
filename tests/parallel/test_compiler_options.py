"""Options of presets reach the compiler; those that it refuses are left out and reported."""

import jax
import pytest

from poly_epo_jax.parallel import compiler_options as module
from poly_epo_jax.parallel.compiler_options import COMPILER_OPTIONS
from poly_epo_jax.parallel.devices import DEVICES
from poly_epo_jax.parallel.sharding import make_mesh

ONE = make_mesh(1, 1, 1)
KNOWN = {"xla_embed_ir_in_executable": True}


@pytest.fixture
def options(monkeypatch):
    module._accepted.cache_clear()
    yield lambda options: monkeypatch.setattr(module, "COMPILER_OPTIONS", {"cpu": options})
    module._accepted.cache_clear()


def test_what_the_compiler_knows_is_passed_on(options):
    options(KNOWN)
    assert module.compiler_options(ONE) == KNOWN
    assert jax.jit(lambda x: x + 1, compiler_options=module.compiler_options(ONE))(1) == 2


def test_what_it_refuses_is_left_out_and_told(options):
    options(KNOWN | {"xla_there_is_no_such": "1"})
    with pytest.warns(UserWarning, match="without xla_there_is_no_such=1"):
        assert module.compiler_options(ONE) == KNOWN


def test_options_are_those_of_known_devices():
    assert COMPILER_OPTIONS.keys() <= DEVICES.keys()
    assert module.compiler_options(ONE) == {}
