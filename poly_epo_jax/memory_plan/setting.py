"""The machine that a memory plan is made for."""

import dataclasses
import math
from collections.abc import Mapping

from poly_epo_jax.parallel.devices import DEVICES


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
