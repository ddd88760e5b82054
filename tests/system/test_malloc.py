"""Memory that malloc keeps is reused without new page faults."""

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
x = jnp.ones(2**24)  # 64 MB: by default, malloc never keeps arrays above 32 MB
for _ in range(12):
    jax.block_until_ready(run(x))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    jax.block_until_ready(run(x))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_programs_reuse_freed_memory():
    pages = 5 * 2**24 * 4 // resource.getpagesize()  # pages of one of the two arrays; the heap may still grow slightly
    faults = {}
    for mode in ("keep", "default"):
        command = [sys.executable, "-c", PROGRAM, mode]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        faults[mode] = int(done.stdout)
    assert faults["keep"] < pages < faults["default"]
    assert faults["keep"] < 0.5 * faults["default"]


@pytest.mark.parametrize(
    ("platforms", "plugins", "expected"),
    [("cpu", ["xla_cuda13"], True), ("cuda,cpu", [], False), ("", ["xla_cuda13"], False)],
)
def test_memory_is_kept_only_without_an_accelerator(platforms, plugins, expected, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plugins)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert malloc._cpu_only() == expected
