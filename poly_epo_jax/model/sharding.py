"""How arrays lie on the mesh: its axes `data`, `fsdp` and `tensor`, and parallel.mesh.RULES for the axes of weights.

`data` replicates the weights, `fsdp` splits each weight along its embedding axis, `tensor` splits heads, MLP and
vocabulary. Rows of a batch are split over `data` and `fsdp` together.
"""

import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from poly_epo_jax.config import ConfigError
from poly_epo_jax.parallel.devices import device_name
from poly_epo_jax.parallel.mesh import AXES, RULES, fill_mesh
from poly_epo_jax.types import Params

ROWS = ("data", "fsdp")


def make_mesh(data: int, fsdp: int, tensor: int, device: str = "", devices: int = 0) -> Mesh:
    """A mesh over the first data * fsdp * tensor devices; one of the three may be -1 and takes what is left.

    Neighbours along `tensor`, then along `fsdp`, are close to each other: on TPUs in the torus, on GPUs in a node.

    Args:
      device: the kind that the devices must be, a key of DEVICES; empty: any.
      devices: how many of them to use; 0: all.

    Raises:
      ConfigError: the devices cannot be arranged so.
    """
    available = jax.devices()
    kind = available[0].device_kind
    if device and device_name(kind) != device:
        raise ConfigError(f"mesh.device={device}, but the devices here are {kind}; choose another mesh.")
    if devices > len(available):
        raise ConfigError(f"mesh.devices={devices}, but there are {len(available)} here; choose another mesh.")
    sizes = fill_mesh({"data": data, "fsdp": fsdp, "tensor": tensor}, devices or len(available))
    shape, used = tuple(sizes.values()), math.prod(sizes.values())
    if used == len(available):
        # Physical axes may be split, so that no arrangement is refused for the shape of the machine.
        arranged = mesh_utils.create_device_mesh(shape, available, allow_split_physical_axes=True)
    elif jax.process_count() > 1:
        raise ConfigError(
            f"The mesh takes {used} of {len(available)} devices, but with {jax.process_count()} processes all must "
            "take part; set one axis to -1."
        )
    else:
        arranged = np.asarray(available[:used]).reshape(shape)
    return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * 3)


def param_shardings(model: nnx.Module, mesh: Mesh) -> dict[str, Any]:
    """The NamedSharding of every weight of a (possibly abstract) model, in the model's own tree."""
    _, state = nnx.split(model)
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda param: param.replace(NamedSharding(mesh, PartitionSpec(*(RULES[axis] for axis in param.axes)))),
            state,
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )
    )


def row_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of batch arrays [rows, ...]."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def constrain_rows(x: jax.Array) -> jax.Array:
    """Fixes an activation [rows, ...] to the batch layout, so that the compiler gathers weights, not activations."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(ROWS))


def gather_weight(weight: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """A weight gathered from its fsdp shards, so that its matmuls are split over rows and tensor only.

    Left to itself, the compiler gathers the activations of all rows instead where both axes are split.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["tensor"] == 1:
        return weight
    gathered = (None if RULES[axis] == "fsdp" else RULES[axis] for axis in axes)
    return jax.lax.with_sharding_constraint(weight, PartitionSpec(*gathered))


def host_mesh(mesh: Mesh) -> Mesh:
    """A mesh of this process's devices alone; with a single process, the same mesh.

    Its `tensor` axis, then its `fsdp` axis, is as large as the host allows; the rest is `data`.
    """
    if jax.process_count() == 1:
        return mesh
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    tensor = math.gcd(mesh.shape["tensor"], len(local))
    fsdp = math.gcd(mesh.shape["fsdp"], len(local) // tensor)
    return Mesh(np.asarray(local).reshape(-1, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3)


def params_on_host(params: Params, mesh: Mesh) -> Params:
    """The weights laid out on `host_mesh(mesh)`: a whole copy on every host, gathered by a collective of all hosts."""
    if jax.process_count() == 1:
        return params
    here = host_mesh(mesh)
    by_host = sorted(mesh.devices.flatten().tolist(), key=lambda device: device.process_index)
    hosts = Mesh(
        np.asarray(by_host).reshape(-1, *here.devices.shape),
        ("hosts", *AXES),
        axis_types=(AxisType.Auto,) * 4,
    )

    def gather(x: jax.Array) -> jax.Array:
        assert isinstance(x.sharding, NamedSharding)
        copies = jax.device_put(x, NamedSharding(hosts, x.sharding.spec))
        shards = [shard.data for shard in copies.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(here, x.sharding.spec), shards)

    return jax.tree.map(gather, params)
