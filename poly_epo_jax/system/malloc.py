"""Configures malloc to reuse freed memory on CPU instead of returning it to the kernel.

Each execution of a compiled program allocates its temporary arrays with malloc. By default, glibc maps large arrays
from the kernel and unmaps them afterwards, so that the kernel clears their pages again for every program. Reusing the
memory avoided all minor page faults in updates of a language model, which had taken a third of the update time. This
module does not import libraries that start threads.
"""

import ctypes
import importlib.metadata
import importlib.util
import os

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # values from <malloc.h>


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory if the CPU is JAX's only device.

    The memory of the process then never drops below its peak. This function must be called before JAX and NumPy are
    imported, because existing threads keep their own arenas, in which large arrays are always mapped.

    Returns:
      True if freed memory is kept.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only available in glibc
    if mallopt is None or not _cpu_only():
        return False
    return all(mallopt(option, value) for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)))


def _cpu_only() -> bool:
    """Returns True if the CPU is JAX's only device. Does not import JAX."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not importlib.metadata.entry_points(group="jax_plugins") and importlib.util.find_spec("libtpu") is None
