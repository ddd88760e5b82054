"""Measures the roofline of a device (Williams et al. 2009): its peak rates of matmuls and of memory traffic."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Large enough that the matmul is limited by arithmetic and the copy by memory.
MATRIX_SIZES = {"cpu": 2048}
ACCELERATOR_MATRIX_SIZE = 8192
COPY_BYTES = {"cpu": 2**28}
ACCELERATOR_COPY_BYTES = 2**32


class Roofline(NamedTuple):
    """Peak rates of one device."""

    flops_per_second: float
    bytes_per_second: float  # read and written


def measure_roofline(dtype: str) -> Roofline:
    """Multiplies random square matrices of this dtype, and scales an array in place, both on the first device."""
    platform = jax.devices()[0].platform
    size = MATRIX_SIZES.get(platform, ACCELERATOR_MATRIX_SIZE)
    # Random, because devices multiply zeros faster.
    matrices = [jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1)]
    multiply = jax.jit(jnp.matmul)
    num_bytes = COPY_BYTES.get(platform, ACCELERATOR_COPY_BYTES)
    values = jnp.ones(num_bytes // 4, jnp.float32)
    # In place; otherwise the time to allocate fresh memory would be measured too.
    scale = jax.jit(lambda x: x * 1.0001, donate_argnums=0)
    _, multiplied = first_and_median_seconds(lambda: multiply(*matrices))

    def copied() -> Any:
        nonlocal values
        values = scale(values)
        return values

    _, scaled = first_and_median_seconds(copied)
    return Roofline(2 * size**3 / multiplied, 2 * num_bytes / scaled)


def first_and_median_seconds(run: Callable[[], Any], repeats: int = 5) -> tuple[float, float]:
    """Seconds of the first call, which compiles, and the median of `repeats` more; each waits for its result."""
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return seconds[0], statistics.median(seconds[1:])
