"""Measures the roofline of a device (Williams et al. 2009): its peak rates for matmuls and memory traffic."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Roofline(NamedTuple):
    """Peak rates of one device.

    Attributes:
      flops_per_second: Floating-point operations of matmuls per second.
      bytes_per_second: Bytes per second that are read from and written to memory, in total.
    """

    flops_per_second: float
    bytes_per_second: float


def measure_roofline(dtype: str) -> Roofline:
    """Measures a multiplication of random square matrices of `dtype`, and in-place scaling of a float32 array.

    Both run on the first device.
    """
    # Sizes at which the matmul is limited by arithmetic and the copy by memory bandwidth.
    size, num_bytes = (2048, 2**28) if jax.devices()[0].platform == "cpu" else (8192, 2**32)
    # The values are random, because some devices multiply zeros faster.
    matrices = [jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1)]
    multiply, values = jax.jit(jnp.matmul), jnp.ones(num_bytes // 4, jnp.float32)
    # The array is scaled in place, because the time of memory allocation should not be measured.
    scale = jax.jit(lambda x: x * 1.0001, donate_argnums=0)
    _, multiplied = first_and_median_seconds(lambda: multiply(*matrices))

    def copied() -> Any:
        nonlocal values
        values = scale(values)
        return values

    _, scaled = first_and_median_seconds(copied)
    return Roofline(2 * size**3 / multiplied, 2 * num_bytes / scaled)


def first_and_median_seconds(run: Callable[[], Any], repeats: int = 5) -> tuple[float, float]:
    """Measures calls of a function, including the wait for their results.

    Args:
      run: Function to measure.
      repeats: Number of calls after the first one.

    Returns:
      Seconds of the first call, which includes compilation, and median seconds of the other calls.
    """
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return seconds[0], statistics.median(seconds[1:])
