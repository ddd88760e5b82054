"""Keeps the memory that programs on a CPU free, instead of returning it and having it cleared again at every step.

Every run of a compiled program allocates its temporary arrays by malloc. glibc maps each large one from the kernel,
page by page, and unmaps it afterwards. Memory that is kept is reused by the next program: in updates of a language
model this saved all minor faults and their system time, a third of what the update took. This module imports nothing
that has threads.
"""

import ctypes
import importlib.metadata
import importlib.util
import os

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of <malloc.h>


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory if the CPU is JAX's only device; returns whether it does.

    It must be called before JAX and NumPy are imported: threads that exist already keep their own arenas, and their
    large arrays are always mapped. Afterwards the process holds what it held at its peak.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's own; other systems do without
    if mallopt is None or not _cpu_only():
        return False
    return all(mallopt(option, value) for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)))


def _cpu_only() -> bool:
    """Whether the CPU is JAX's only device, determined without JAX."""
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
        return platforms == "cpu"
    return not importlib.metadata.entry_points(group="jax_plugins") and importlib.util.find_spec("libtpu") is None
