"""The most memory that training has held so far, to be compared with the plan's."""

import re
from pathlib import Path

import jax

STATUS = Path("/proc/self/status")  # Linux


def peak_bytes() -> int | None:
    """The peak of this host's fullest device or, if its devices are CPUs, of this process; None: it is not known."""
    return _process_peak() if jax.local_devices()[0].platform == "cpu" else device_peak()


def device_peak() -> int | None:
    """The peak of this host's fullest device; None: the devices do not report it, as CPUs do not."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    found = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    return max(found) if len(found) == len(stats) else None


def _process_peak() -> int | None:
    # Not getrusage's peak, which begins with that of the process that started this one.
    found = re.search(r"^VmHWM:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    return 1024 * int(found[1]) if found else None
