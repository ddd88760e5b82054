"""The devices of a preset machine, which need not be here: XLA compiles for them, but nothing can run on them."""

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
"""Chips along each axis of the torus, by device and number of chips."""

HOST_SHAPES = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
"""Chips of one host along each axis, by their number."""

TPU_LINKS = {"v5p": 6, "v6e": 4}
"""Links of a chip, two along each axis of the torus; along an axis of two chips, only one leads to another chip."""

TPU_CLOCKS = {"v5p": 1.75e9, "v6e": 1.75e9}
"""Cycles per second: the stated FLOP/s over the FLOPs of a cycle (8 matrix units of 128 x 128, and 4 of 256 x 256)."""

LIBTPU_ALONE = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
"""Environment variables that keep libtpu from asking a cloud where it is, and from locking a device it does not use."""

GPU_SPECS = {
    "rtx4090": Path(__file__).with_name("rtx4090.txtpb"),
    "h100": Path(__file__).with_name("h100.txtpb"),
    "h200": Path(__file__).with_name("h200.txtpb"),
}
"""Descriptions of GPUs that XLA cannot query: xla.gpu's GpuTargetConfigProto."""


def preset_devices(preset: Mapping[str, Any]) -> Sequence[Any]:
    """The jax.Devices of an entry of machines.MESHES.

    Raises:
      ConfigError: this environment has no compiler for them.
    """
    device, count, hosts = preset["device"], preset["devices"], preset["processes"]
    # The runtime of a TPU or a GPU is not used: it would look for devices here.
    jax.config.update("jax_platforms", "cpu")
    if device in GPU_SPECS:
        _require("jax_cuda13_plugin", "gpu", device)
        topology = f"1x{hosts}x{count // hosts}"
        return get_topology_desc("", "cuda", topology=topology, target_config=GPU_SPECS[device].read_text()).devices
    if (device, count) not in TPU_SHAPES:
        raise ConfigError(f"--compile-for: {device} is compiled for where it is; choose an H200's or a TPU's mesh.")
    _require("libtpu", "tpu", device)
    os.environ |= LIBTPU_ALONE
    name, bounds = f"{device}:{TPU_SHAPES[device, count]}", HOST_SHAPES[count // hosts]
    return get_topology_desc(platform="tpu", topology_name=name, chips_per_host_bounds=bounds).devices


def device_rates(preset: Mapping[str, Any], devices: Sequence[Any]) -> Rates:
    """The rates that makers state for one device. Of a TPU's links, only those to another chip of the slice count."""
    name = preset["device"]
    stated = DEVICES[name]
    assert stated.flops_per_second and stated.bytes_per_second and stated.link_bytes_per_second
    one_way = stated.link_bytes_per_second / 2
    if name in TPU_LINKS:
        sizes = [len(set(along)) for along in zip(*(device.coords for device in devices), strict=True)]
        one_way *= sum(min(size - 1, 2) for size in sizes) / TPU_LINKS[name]
    return Rates(stated.flops_per_second, stated.bytes_per_second, one_way, TPU_CLOCKS.get(name))


def _require(module: str, environment: str, device: str) -> None:
    if not importlib.util.find_spec(module):
        raise ConfigError(
            f"Compiling for {device} needs {module}, which is not installed here; make the environment that has it "
            f"with: bash launch/compiler_env.sh {environment}, then run this with .venv-{environment}/bin/python."
        )
