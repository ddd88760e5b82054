"""The most memory that training has held so far, to be laid beside the plan's."""

import re
from pathlib import Path

import jax

STATUS = Path("/proc/self/status")  # Linux


def peak_bytes() -> int | None:
    """Of one device of this host, the fullest; of this process, where its devices are CPUs; None: it is not told."""
    return _process_peak() if jax.local_devices()[0].platform == "cpu" else device_peak()


def device_peak() -> int | None:
    """Of the fullest device of this host; None: they do not tell, as CPUs do not."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    found = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    return max(found) if len(found) == len(stats) else None


def _process_peak() -> int | None:
    # Not getrusage's, which begins with that of the process which started this one.
    found = re.search(r"^VmHWM:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    return 1024 * int(found[1]) if found else None
