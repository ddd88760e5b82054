"""Test configuration: shapes and types are checked at run time; rank promotion and warnings are errors."""

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import quick_compiles

# Must be set before jax is imported: eight CPU devices for meshes, and fast compilation, which dominates the test time.
# POLY_EPO_TEST_PLATFORM=gpu runs the tests in tests/accelerator.txt, which use one device, on a GPU.
if os.environ.setdefault("POLY_EPO_TEST_PLATFORM", "cpu") == "cpu":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {quick_compiles.FLAGS}"
# launch/test.sh all installs torch here for comparisons. Processes that tests start must not find it.
sys.path.append(os.path.join(sys.prefix, "torch"))
# Test files and later runs share compiled programs. The folders have no size limit: with a limit, JAX reads the sizes
# and times of all files, and locks the folder, whenever it writes a program.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

from types import SimpleNamespace

import jax
import pytest
from cpu_seconds import CpuSeconds
from fork_server import ForkServer
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import install_import_hook

MAX_MEMORY_MAPS = 20_000
"""Number of memory maps of a test process above which the programs of finished test files are released."""

COMPILED = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
"""Folder of compiled programs, which has a folder for each test file, and one for the processes of each worker."""

# Without a lock, a process could read a program that another process is writing.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(COMPILED / worker)
install_import_hook("poly_epo_jax", "beartype.beartype")
jax.config.update("jax_numpy_rank_promotion", "raise")
if os.environ["POLY_EPO_TEST_PLATFORM"] != "cpu":
    # The tolerances of the tests are those of float32. By default, other devices round the operands of matmuls to 10
    # bits or fewer (TF32, bfloat16), whose errors of 1e-3 would hide most defects. The doctor tests the default.
    jax.config.update("jax_default_matmul_precision", "highest")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--max-cpu-seconds", type=float, help="print CPU seconds, and fail if all tests take more")


def pytest_configure(config: pytest.Config) -> None:
    if (limit := config.getoption("max_cpu_seconds")) is not None:
        config.pluginmanager.register(CpuSeconds(limit))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs files with slow tests first, so that the workers finish at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Excludes the objects of imported modules from garbage collections, which each read of a checkpoint starts."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def compiled_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Caches all compiled programs, including small programs, which take most of the test time.

    Each test file has a separate folder, to which only one worker writes.
    """
    jax.config.update("jax_compilation_cache_dir", str(COMPILED / request.path.stem))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    yield
    # A compiled program has about 17 memory maps. The compiler crashes if a process exceeds 65,530, the limit of Linux.
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MAX_MEMORY_MAPS:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def abandoned_threads() -> Iterator[None]:
    """Waits until the threads that a test has abandoned have ended, because the count is one of the process."""
    from fakes import PATIENCE

    from poly_epo_jax.system.daemon_thread import num_abandoned_threads

    yield
    end = time.monotonic() + PATIENCE
    while num_abandoned_threads() and time.monotonic() < end:
        time.sleep(0.001)
    assert not num_abandoned_threads(), "the test leaves a thread whose call does not return"


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Settings that make all training runs of the session share base policies, and those of a worker their programs.

    JAX does not write programs atomically. Another worker could read an incomplete file.
    """
    mine = tmp_path_factory.getbasetemp()
    session = mine.parent if os.environ.get("PYTEST_XDIST_WORKER") else mine
    return {"base.cache_dir": session / "base", "compilation_cache_dir": mine / "compiled"}


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Runs commands without the time for their imports."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Restores the default handlers of signals that nohup and shells make background processes ignore."""
    defaults = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Simulated clock of poly_epo_jax/records/timeline.py. It only changes when a test changes it."""
    time = [100.0]
    monkeypatch.setattr("poly_epo_jax.records.timeline.time", SimpleNamespace(perf_counter=lambda: time[0]))
    return time
