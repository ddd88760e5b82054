"""Keeps the memory that a CPU's programs free, instead of giving it back and having it cleared anew at every step.

Every run of a compiled program takes its temporary arrays by malloc. glibc maps each large one from the kernel, page by
page, and unmaps it afterwards. What is kept is used again by the next program: in updates of a language model this
saved all minor faults, and the system time of them, a third of what the update took. Imports nothing that has threads.
"""

import ctypes
import importlib.metadata
import importlib.util
import os

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of <malloc.h>


def keep_freed_memory() -> bool:
    """Has malloc keep what is freed, where JAX has no device but the CPU; returns whether it does.

    Comes before JAX and NumPy are imported: threads that exist keep arenas of their own, and large arrays of theirs are
    always mapped. The process then holds what it held at its peak.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's own; other systems do without
    if mallopt is None or not _cpu_only():
        return False
    return all(mallopt(option, value) for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)))


def _cpu_only() -> bool:
    """Asked without JAX."""
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
        return platforms == "cpu"
    return not importlib.metadata.entry_points(group="jax_plugins") and importlib.util.find_spec("libtpu") is None
