"""Memory and CPU limits of this process: the resources of the machine, or the limits of a container or batch job."""

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
"""Root of the file system that contains `proc` and the mounted control groups."""

# Files with memory limits: memory.max (kills) and memory.high (throttles) of cgroup v2, and the limit of cgroup v1.
_MEMORY = ("memory.max", "memory.high", "memory.limit_in_bytes")


def memory_limit() -> int:
    """Returns the number of bytes of memory that this process may use.

    The result is the memory of the machine or, if it is smaller, the memory limit of the control group of this process
    or of a parent.
    """
    limits = [_read(group / name) for group in _groups("memory") for name in _MEMORY]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(int(limit) for limit in limits if limit.isdecimal())])


def cpu_limit() -> int:
    """Returns the number of CPU cores that this process may use at the same time.

    The result is the number of cores that the process is allowed to run on or, if it is smaller, the CPU quota of its
    control group or of a parent, rounded up.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups("cpu"):
        # Version 2 has one file with quota and period, version 1 has two. Without a limit, the quota is "max" or -1.
        text = " ".join(_read(group / name) for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
        quota, period = text.split() or ("max", "")
        if quota.isdecimal():
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores


def _groups(controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control groups that limit a resource, and of their visible parents.

    Args:
      controller: Name of the cgroup v1 controller. The single hierarchy of version 2 is included if it is mounted.
    """
    paths = {}
    for line in filter(None, _read(ROOT / "proc/self/cgroup").split("\n")):
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), PurePosixPath(path))  # version 2 does not list controllers
    for line in filter(None, _read(ROOT / "proc/self/mountinfo").split("\n")):
        mount, _, source = line.partition(" - ")
        top, folder = mount.split()[3:5]
        kind, *_, options = source.split()
        path = paths.get("" if kind == "cgroup2" else controller)
        if path is None or not (kind == "cgroup2" or (kind == "cgroup" and controller in options.split(","))):
            continue
        # A container may only see its own part of the hierarchy, at the mount point.
        is_visible = path.is_relative_to(top) and ".." not in path.parts
        inner = path.relative_to(top) if is_visible else PurePosixPath()
        for group in (inner, *inner.parents):
            yield ROOT / folder.lstrip("/") / group


def _read(path: Path) -> str:
    """Returns the text of a file without its final line break, or an empty text if the file cannot be read."""
    try:
        return path.read_text(errors="surrogateescape").strip()
    except OSError:
        return ""
