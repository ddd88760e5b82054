"""Devices of a preset machine, which XLA can compile for without access to the machine."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.topologies import get_topology_desc

from poly_epo_jax.bench.aot.estimate import Rates
from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.parallel.devices import DEVICES

TPU_SHAPES = {
    ("v4", 4): "2x2x1",
    ("v5e", 1): "1x1",
    ("v5e", 4): "2x2",
    ("v5e", 8): "2x4",
    ("v5e", 16): "4x4",
    ("v5e", 64): "8x8",
    ("v5p", 4): "2x2x1",
    ("v5p", 8): "2x2x2",
    ("v5p", 16): "2x2x4",
    ("v5p", 32): "2x4x4",
    ("v6e", 1): "1x1",
    ("v6e", 4): "2x2",
    ("v6e", 8): "2x4",
    ("v6e", 16): "4x4",
    ("v6e", 32): "4x8",
    ("v6e", 64): "8x8",
}
"""Numbers of chips along the axes of the torus, by device and number of chips."""

HOST_SHAPES = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
"""Numbers of chips of one host along the axes of the torus, by the number of chips of a host."""

TPU_LINKS = {"v4": 6, "v5e": 4, "v5p": 6, "v6e": 4}
"""Number of links of a chip, two along each axis of the torus. Along an axis of two chips, only one of them is used."""

TPU_CLOCKS = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
"""Clock rate in cycles per second: specified FLOP/s divided by FLOPs per cycle.

v4 and v5p have 8 matrix units of 128 x 128, v5e has 4 of 128 x 128, and v6e has 4 of 256 x 256.
"""

CHIP_CONFIGS = {"v4": {"chip_config_name": "megacore"}}
"""Options of the topology by device. With these, both cores of a v4 chip are one device, as on other chips."""

LIBTPU_ALONE = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
"""Environment variables that prevent libtpu from querying cloud metadata and from locking a device."""

GPU_SPECS = {path.stem: path for path in Path(__file__).parent.glob("*.txtpb")}
"""Files with the descriptions of GPUs (XLA's GpuTargetConfigProto), which XLA otherwise queries from the device."""


def preset_devices(preset: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the `jax.Device` objects of an entry of `machines.MESHES`.

    Raises:
      ConfigError: If compiling for the machine is not supported, or its compiler is not installed.
    """
    device, count, hosts = preset["device_kind"], preset["num_devices"], preset["processes"]
    # Prevents JAX from initializing a TPU or GPU runtime, which would search for local devices.
    jax.config.update("jax_platforms", "cpu")
    if device in GPU_SPECS:
        _require("jax_cuda13_plugin", "gpu", device)
        return get_topology_desc(
            "", "cuda", topology=f"1x{hosts}x{count // hosts}", target_config=GPU_SPECS[device].read_text()
        ).devices
    if (device, count) not in TPU_SHAPES:
        raise ConfigError(f"--compile_for does not support {device}; choose a machine with GPUs or TPUs.")
    _require("libtpu", "tpu", device)
    os.environ |= LIBTPU_ALONE
    options = CHIP_CONFIGS.get(device, {}) | {"chips_per_host_bounds": HOST_SHAPES[count // hosts]}
    return get_topology_desc(f"{device}:{TPU_SHAPES[device, count]}", "tpu", **options).devices


def device_rates(preset: Mapping[str, Any], devices: Sequence[Any]) -> Rates:
    """Returns the peak rates of one device according to vendor specifications.

    Args:
      preset: Entry of `machines.MESHES`.
      devices: Devices of the preset. For TPUs, only links to other chips of the slice are counted.
    """
    name = preset["device_kind"]
    specs = DEVICES[name]
    assert specs.flops_per_second and specs.bytes_per_second and specs.link_bytes_per_second
    one_way = specs.link_bytes_per_second / 2
    if name in TPU_LINKS:
        sizes = [len(set(along)) for along in zip(*(device.coords for device in devices), strict=True)]
        one_way *= sum(min(size - 1, 2) for size in sizes) / TPU_LINKS[name]
    return Rates(specs.flops_per_second, specs.bytes_per_second, one_way, TPU_CLOCKS.get(name))


def _require(module: str, environment: str, device: str) -> None:
    if not importlib.util.find_spec(module):
        raise ConfigError(
            f"Compiling for {device} requires {module}, which is not installed. Create an environment with bash "
            f"launch/compiler_env.sh {environment}, then run this command with .venv-{environment}/bin/python."
        )
