"""What a device does at best, measured: matrix products per second and bytes to and from its memory."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Large enough to be limited by arithmetic, and by memory: on accelerators, and on a CPU.
MATRIX_SIZES = {"cpu": 2048}
ACCELERATOR_MATRIX_SIZE = 8192
COPY_BYTES = {"cpu": 2**28}
ACCELERATOR_COPY_BYTES = 2**32


class Ceilings(NamedTuple):
    """Of one device."""

    flops_per_second: float
    bytes_per_second: float  # read and written


def measure_ceilings(dtype: str) -> Ceilings:
    """Multiplies random square matrices of this type, and copies an array; the first device does both."""
    backend = jax.default_backend()
    size = MATRIX_SIZES.get(backend, ACCELERATOR_MATRIX_SIZE)
    # Random, as zeros are multiplied faster.
    matrices = [jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1)]
    product = jax.jit(jnp.matmul)
    num_bytes = COPY_BYTES.get(backend, ACCELERATOR_COPY_BYTES)
    values = jnp.ones(num_bytes // 4, jnp.float32)
    # In place, so that fresh memory is not what is measured.
    scale = jax.jit(lambda x: x * 1.0001, donate_argnums=0)
    _, multiplied = first_and_median_seconds(lambda: product(*matrices))

    def copied() -> Any:
        nonlocal values
        values = scale(values)
        return values

    _, scaled = first_and_median_seconds(copied)
    return Ceilings(2 * size**3 / multiplied, 2 * num_bytes / scaled)


def first_and_median_seconds(run: Callable[[], Any], repeats: int = 5) -> tuple[float, float]:
    """Of a first call, which compiles, and the median of `repeats` after it, each with the wait for its result."""
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return seconds[0], statistics.median(seconds[1:])
