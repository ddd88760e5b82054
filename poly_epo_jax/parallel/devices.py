"""Devices: what their makers state about memory, arithmetic and bandwidths; the most memory held so far."""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax


class Device(NamedTuple):
    """One GPU or TPU chip; None for values that differ from machine to machine. GB are 10^9 bytes."""

    kinds: tuple[str, ...]  # what jax.Device.device_kind begins with
    memory_bytes: int | None
    flops_per_second: float | None  # dense bf16 matmuls
    bytes_per_second: float | None  # to and from its memory
    link_bytes_per_second: float | None  # to its neighbours, the sum of both directions
    # The share of the memory that JAX takes; on GPUs, XLA_PYTHON_CLIENT_MEM_FRACTION overrides it.
    jax_share: float = 1.0


DEVICES = {
    "cpu": Device(("cpu",), None, None, None, None),
    "rtx4090": Device(("NVIDIA GeForce RTX 4090",), 24 * 10**9, 165.2e12, 1.008e12, 64e9, jax_share=0.75),
    "h100": Device(("NVIDIA H100 80GB",), 80 * 10**9, 989e12, 3.35e12, 900e9, jax_share=0.75),
    "h200": Device(("NVIDIA H200",), 141 * 10**9, 989e12, 4.8e12, 900e9, jax_share=0.75),
    "v5p": Device(("TPU v5p",), 95 * 10**9, 459e12, 2.765e12, 1200e9),
    "v6e": Device(("TPU v6",), 32 * 10**9, 918e12, 1.638e12, 800e9),
}


def device_name(kind: str) -> str:
    """The key in DEVICES of the device that JAX calls `kind`; "" if it is none of them."""
    if kind == "TPU v5":  # some versions' name for v5p; other devices' names begin like this too
        return "v5p"
    return next((name for name, device in DEVICES.items() if kind.startswith(device.kinds)), "")


@dataclasses.dataclass(frozen=True)
class Setting:
    """The machine of a plan: the kind of device, a key of DEVICES or "", and the sizes of the mesh's axes."""

    device: str
    mesh: Mapping[str, int]

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`. An unknown device is treated as a GPU."""
        if self.device == "cpu":
            return "cpu"
        return "tpu" if self.device and DEVICES[self.device].kinds[0].startswith("TPU") else "gpu"

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def row_shards(self) -> int:
        return self.mesh["data"] * self.mesh["fsdp"]

    @property
    def weight_shards(self) -> int:
        return self.mesh["fsdp"] * self.mesh["tensor"]


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
