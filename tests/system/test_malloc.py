"""Memory that malloc keeps is not mapped and cleared again."""

import importlib.metadata
import os
import resource
import subprocess
import sys

import pytest

from poly_epo_jax.system import malloc

PROGRAM = """
import resource, sys
from poly_epo_jax.system.malloc import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
import jax, jax.numpy as jnp

run = jax.jit(lambda x: (x + 1, x - 1))
x = jnp.ones(2**24)  # 64 MB: above 32 MB malloc keeps nothing by itself
for _ in range(12):
    jax.block_until_ready(run(x))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    jax.block_until_ready(run(x))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_programs_run_in_memory_that_is_there():
    pages = 5 * 2**24 * 4 // resource.getpagesize()  # of one of two arrays; their heap may still grow a little
    faults = {}
    for what in ("keep", "as it is"):
        command = [sys.executable, "-c", PROGRAM, what]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        faults[what] = int(done.stdout)
    assert faults["keep"] < pages < faults["as it is"]
    assert faults["keep"] < 0.5 * faults["as it is"]


@pytest.mark.parametrize(
    ("platforms", "plugins", "expected"),
    [("cpu", ["xla_cuda13"], True), ("cuda,cpu", [], False), ("", ["xla_cuda13"], False)],
)
def test_only_where_there_is_no_accelerator(platforms, plugins, expected, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plugins)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert malloc._cpu_only() == expected
