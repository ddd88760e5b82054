"""How arrays are laid out on the mesh: its axes `data`, `fsdp`, `tensor`, and parallel.mesh.RULES for weights' axes.

`data` replicates the weights, `fsdp` splits each weight along its embedding axis, `tensor` splits heads, MLP and
vocabulary. Rows of a batch are split over `data` and `fsdp` together.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.parallel.devices import device_name
from poly_epo_jax.parallel.mesh import AXES, RULES, fill_mesh
from poly_epo_jax.types import Params

ROWS = ("data", "fsdp")


def make_mesh(
    data: int,
    fsdp: int,
    tensor: int,
    device: str = "",
    devices: int = 0,
    available: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh over the first data * fsdp * tensor devices; one of the three may be -1 and takes the rest.

    Neighbours along `tensor`, then along `fsdp`, are close to each other: on TPUs in the torus, on GPUs in a node.

    Args:
      device: the kind that the devices must be, a key of DEVICES; empty: any.
      devices: how many of them to use; 0: all.
      available: the jax.Devices to choose from, which need not be here; None: those of this process.

    Raises:
      ConfigError: the devices cannot be arranged like this.
    """
    available = jax.devices() if available is None else available
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


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: where the program that is being traced will run.

    This is read from the devices of the current mesh, because programs are also compiled for devices that are not here.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def row_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of batch arrays [rows, ...]."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def pinned(x: jax.Array, *spec: Any) -> jax.Array:
    """Fixes the layout of an array under a mesh; activations [rows, ...] have the spec ROWS."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:  # with manual axes, x holds this device's own rows
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def gather_weight(weight: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """A weight gathered from its fsdp shards, so that its matmuls are split over rows and tensor only.

    Left to itself, the compiler instead gathers the activations of all rows if both axes are split, and gathers a
    weight once for each use of it.
    """
    return pinned(weight, *(None if RULES[axis] == "fsdp" else RULES[axis] for axis in axes))


def split_outputs(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Outputs [rows, out], split over tensor if the weight's output axes are, as the weight's gradient will read them.

    Left to itself, the compiler may keep them split over rows for the backward pass, and exchange those of all layers.
    """
    return pinned(x, ROWS, "tensor") if "tensor" in [RULES[axis] for axis in axes] else x


def summed_over_rows(
    product: Callable[[jax.Array, jax.Array], jax.Array], shape: Sequence[int], axes: tuple[str, ...], num_inputs: int
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A weight's gradient from all rows: each device takes the product of its own, then they are summed and split.

    Only this guarantees that gradients are scattered, in the type of the product. Left to itself, the compiler may
    gather the activations of all rows, or all heads of the gradient, or give every device the sum of all.

    Args:
      product: (inputs [rows, in], gradients of outputs [rows, out]) -> [in, out], where tensor splits in or out.
      shape, axes: the weight's; its first `num_inputs` axes are those of the inputs.
    """
    mesh, split = jax.sharding.get_abstract_mesh(), [RULES[axis] for axis in axes]
    if mesh.empty:
        return lambda x, d_out: product(x, d_out).reshape(shape)
    own = [size // mesh.shape["tensor"] if axis == "tensor" else size for size, axis in zip(shape, split, strict=True)]

    def part(x: jax.Array, d_out: jax.Array) -> jax.Array:
        gradient = product(x, d_out).reshape(own)
        if mesh.shape["fsdp"] > 1 and "fsdp" in split:
            gradient = jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=split.index("fsdp"), tiled=True)
        elif mesh.shape["fsdp"] > 1:  # a thin matrix that every part has whole
            gradient = jax.lax.psum(gradient, "fsdp")
        return jax.lax.psum(gradient, "data") if mesh.shape["data"] > 1 else gradient

    sides = split[:num_inputs], split[num_inputs:]
    rows = tuple(PartitionSpec(ROWS, "tensor" if "tensor" in side else None) for side in sides)
    return jax.shard_map(part, in_specs=rows, out_specs=PartitionSpec(*split), check_vma=False)


def host_mesh(mesh: Mesh) -> Mesh:
    """A mesh of this process's devices alone; if all devices belong to one process, the same mesh.

    Its `tensor` axis, then its `fsdp` axis, is as large as the host allows; the rest is `data`.
    """
    if len({device.process_index for device in mesh.devices.flat}) == 1:
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
