"""Tests that each run writes its compiled programs to its own folder."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from poly_epo_jax.config.keys import Config
from poly_epo_jax.startup.prepare import configure_compiler


@pytest.fixture(autouse=True)
def _restore_cache() -> Iterator[None]:
    before = jax.config.values["jax_compilation_cache_dir"]
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_a_second_run_in_a_process_uses_its_own_folder(tmp_path: Path):
    for number, name in enumerate(("first", "second")):
        configure_compiler(Config(compilation_cache_dir=str(tmp_path / name)))
        jax.jit(lambda x, number=number: x + number)(1.0)
    assert all(list((tmp_path / name).glob("jit__lambda*")) for name in ("first", "second"))
