"""Vendor specifications of supported devices, and their peak memory use."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.parallel.mesh import host_axes
from poly_epo_jax.system.missing_packages import install_command
from poly_epo_jax.system.text import first_line


class Device(NamedTuple):
    """Specification of a GPU or TPU chip. Values that differ between machines are None.

    Attributes:
      kinds: Prefixes of `jax.Device.device_kind` with a space appended.
      memory_bytes: Device memory in bytes.
      flops_per_second: Peak rate of dense bfloat16 matmuls.
      bytes_per_second: Memory bandwidth.
      link_bytes_per_second: Bandwidth of all links to other devices, in both directions together.
      jax_share: Fraction of the device memory that JAX uses by default. On GPUs, XLA_PYTHON_CLIENT_MEM_FRACTION
        overrides it.
    """

    kinds: tuple[str, ...]
    memory_bytes: int | None
    flops_per_second: float | None
    bytes_per_second: float | None
    link_bytes_per_second: float | None
    jax_share: float = 1.0


DEVICES = {
    "cpu": Device(("cpu",), None, None, None, None),
    "rtx4090": Device(("NVIDIA GeForce RTX 4090",), 24 * 10**9, 165.2e12, 1.008e12, 64e9, jax_share=0.75),
    "rtx5090": Device(("NVIDIA GeForce RTX 5090",), 32 * 10**9, 209.5e12, 1.792e12, 128e9, jax_share=0.75),
    "l4": Device(("NVIDIA L4 ",), 24 * 10**9, 121e12, 0.3e12, 64e9, jax_share=0.75),  # not the L40
    "a100-40": Device(
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), 40 * 10**9, 312e12, 1.555e12, 600e9, jax_share=0.75
    ),
    "a100-80": Device(
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), 80 * 10**9, 312e12, 2.039e12, 600e9, jax_share=0.75
    ),
    "h100": Device(("NVIDIA H100 80GB",), 80 * 10**9, 989e12, 3.35e12, 900e9, jax_share=0.75),
    "h200": Device(("NVIDIA H200",), 141 * 10**9, 989e12, 4.8e12, 900e9, jax_share=0.75),
    "v4": Device(("TPU v4",), 32 * 10**9, 275e12, 1.228e12, 600e9),
    "v5e": Device(("TPU v5 lite", "TPU v5e"), 16 * 10**9, 197e12, 0.819e12, 400e9),
    "v5p": Device(("TPU v5p",), 95 * 10**9, 459e12, 2.765e12, 1200e9),
    "v6e": Device(("TPU v6",), 32 * 10**9, 918e12, 1.638e12, 800e9),
}


def device_name(kind: str) -> str:
    """Returns the key in DEVICES of a `jax.Device.device_kind`, or "" for other devices."""
    # Some versions of the TPU runtime report this name for v5p. It is not in `kinds`, because other device kinds begin
    # with it.
    if kind == "TPU v5":
        return "v5p"
    return next((name for name, device in DEVICES.items() if f"{kind} ".startswith(device.kinds)), "")


_EXTRAS = {"cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}


def find_devices() -> list[Any]:
    """Returns `jax.devices()`, and starts the platform of JAX on the first call.

    Raises:
      ConfigError: If the platform cannot be used. The message names the platforms that exist.
    """
    try:
        return jax.devices()
    except (AssertionError, RuntimeError) as error:  # The assertion of JAX has no message.
        selected = jax.config.values["jax_platforms"]
        if not selected:
            raise ConfigError(f"JAX cannot use the devices of this machine: {first_line(error)}") from error
        jax.config.update("jax_platforms", "")
        existing = {"cpu"}
        with contextlib.suppress(RuntimeError):
            existing.add(jax.default_backend())
        # Without these lines, a second call would use another platform than the selected one.
        jax.extend.backend.clear_backends()
        jax.config.update("jax_platforms", selected)
        extra = next((_EXTRAS[name] for name in selected.split(",") if name in _EXTRAS), "")
        remedy = f" or, on a machine with such devices, run: {install_command(extra)}" if extra else ""
        raise ConfigError(
            f"JAX_PLATFORMS={selected} cannot be used, because JAX only finds {' and '.join(sorted(existing))} here; "
            f"unset it{remedy}."
        ) from error


@dataclasses.dataclass(frozen=True)
class Machine:
    """Target machine of a memory plan.

    Attributes:
      device: Key of DEVICES, or "" for an unknown device.
      mesh: Size of each mesh axis.
      processes: Number of processes, one per host.
    """

    device: str
    mesh: Mapping[str, int]
    processes: int = 1

    @property
    def host(self) -> "Machine":
        """The devices of one process, with its own mesh."""
        return Machine(self.device, host_axes(self.mesh, self.num_devices // self.processes))

    @property
    def platform(self) -> str:
        """Platform of the device: `cpu`, `gpu` or `tpu`. Unknown devices are treated as GPUs."""
        if self.device == "cpu":
            return "cpu"
        return "tpu" if self.device and DEVICES[self.device].kinds[0].startswith("TPU") else "gpu"

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def weight_shards(self) -> int:
        """Number of shards of a weight."""
        return self.mesh["fsdp"] * self.mesh["tensor"]


STATUS = Path("/proc/self/status")  # Only exists on Linux.


def peak_bytes() -> int | None:
    """Returns the peak memory in bytes of the most heavily used local device or, on CPU, of this process.

    Returns None if it is unavailable.
    """
    return _process_peak() if jax.local_devices()[0].platform == "cpu" else device_peak()


def device_peak() -> int | None:
    """Returns the peak memory in bytes of the most heavily used local device.

    Returns None if a device does not report it, as on CPU.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    found = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    return max(found) if len(found) == len(stats) else None


def _process_peak() -> int | None:
    # The peak of getrusage is not used, because it includes the peak of the parent process at the time of the fork.
    found = re.search(r"^VmHWM:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    return 1024 * int(found[1]) if found else None
