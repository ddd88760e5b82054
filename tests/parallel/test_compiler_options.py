"""Tests that options reach the compiler, and that rejected options are omitted with a warning."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

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


def test_known_options_are_used(options):
    options(KNOWN)
    assert module.compiler_options(ONE) == KNOWN
    assert jax.jit(lambda x: x + 1, compiler_options=module.compiler_options(ONE))(1) == 2


def test_rejected_options_are_omitted_with_a_warning(options):
    options(KNOWN | {"xla_there_is_no_such": "1"})
    with pytest.warns(UserWarning, match="xla_there_is_no_such=1"):
        assert module.compiler_options(ONE) == KNOWN


def test_options_are_checked_with_a_device_of_this_process(options, monkeypatch):
    options(KNOWN)
    others = [SimpleNamespace(process_index=1, device_kind="cpu"), *ONE.devices.flat]
    checked = []
    monkeypatch.setattr(module, "_rejection", lambda device, _: checked.append(device))
    assert module.compiler_options(Mock(spec=Mesh, devices=np.array(others))) == KNOWN
    assert checked == [*ONE.devices.flat]


def test_only_programs_on_gpus_are_deterministic_and_only_if_selected(monkeypatch):
    monkeypatch.setattr(module, "_uses_deterministic", False)
    double, compiled = module.Jit(lambda x: 2 * x), []
    for backend, enabled in (("cpu", True), ("gpu", False), ("gpu", True), ("tpu", True)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        module.use_deterministic_programs(enabled)
        assert double(3.0) == 6
        expected = module.DETERMINISTIC if (backend, enabled) == ("gpu", True) else {}
        assert module.deterministic_options() == module.compiler_options(ONE) == expected
        programs: tuple[Any, Any] = double._default, double._deterministic
        compiled.append(tuple(one._cache_size() for one in programs))
    assert compiled == [(1, 0), (1, 0), (1, 1), (1, 1)]


def test_options_refer_to_known_devices():
    assert COMPILER_OPTIONS.keys() <= DEVICES.keys()
    assert module.compiler_options(ONE) == {}
