"""Meshes with the axes of parallel.mesh.AXES, and the sharding of weights and activations over them.

Weights are replicated over `data`. `fsdp` shards each weight along its `hidden_size` axis, `expert` shards the experts
of a mixture, and `tensor` shards heads, MLP and vocabulary, as defined by parallel.mesh.RULES. The rows of a batch are
sharded over `data`, `fsdp` and `expert` together (ROWS), and weights other than experts are replicated over `expert`.
Weights are gathered over `fsdp` before they are used, and their gradients are summed and scattered afterwards.
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
from poly_epo_jax.parallel.devices import device_name, find_devices
from poly_epo_jax.parallel.mesh import AXES, ROWS, RULES, fill_mesh, host_axes
from poly_epo_jax.types import Params


def make_mesh(
    data: int,
    fsdp: int,
    tensor: int,
    expert: int = 1,
    device_kind: str = "",
    num_devices: int = 0,
    available: Sequence[Any] | None = None,
) -> Mesh:
    """Creates a mesh over the first data * fsdp * tensor * expert devices.

    Devices that are neighbors along `expert`, then along `tensor`, and then along `fsdp`, are physically close: in the
    torus of TPUs, or in the same node on GPUs.

    Args:
      data: Size of the axis `data`. One of the sizes may be -1, which selects the number of remaining devices.
      fsdp: Size of the axis `fsdp`.
      tensor: Size of the axis `tensor`.
      expert: Size of the axis `expert`.
      device_kind: Required device kind, a key of DEVICES. If empty, any kind is accepted.
      num_devices: Number of devices that an axis of size -1 fills, and maximum size of the mesh. 0 selects all devices.
      available: Devices to choose from, which may be descriptions of absent devices. If None, `jax.devices()`.

    Returns:
      The mesh.

    Raises:
      ConfigError: If JAX finds no devices, if they are of another kind, or if their number does not match the axes.
    """
    available = find_devices() if available is None else available
    kind = available[0].device_kind
    if device_kind and device_name(kind) != device_kind:
        raise ConfigError(
            f"mesh.device_kind={device_kind}, but the available devices are {kind}; set mesh.device_kind='' to use "
            "them, or install the extra [gpu] or [tpu] if this machine has other devices."
        )
    if num_devices > len(available):
        raise ConfigError(f"mesh.num_devices={num_devices}, but only {len(available)} are available; reduce it.")
    sizes = fill_mesh({"data": data, "fsdp": fsdp, "tensor": tensor, "expert": expert}, num_devices or len(available))
    shape, used = tuple(sizes.values()), math.prod(sizes.values())
    if used == len(available):
        # Splitting physical axes is allowed, so that the topology of the machine does not restrict the mesh.
        arranged = mesh_utils.create_device_mesh(shape, available, allow_split_physical_axes=True)
    elif jax.process_count() > 1:
        raise ConfigError(
            f"The mesh uses {used} of {len(available)} devices, but {jax.process_count()} processes must use all "
            "devices; set one mesh axis to -1."
        )
    else:
        arranged = np.asarray(available[:used]).reshape(shape)
    return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def param_shardings(model: nnx.Module, mesh: Mesh) -> dict[str, Any]:
    """Returns the sharding of each weight of a model, according to parallel.mesh.RULES.

    Args:
      model: Model, possibly abstract.
      mesh: Mesh.

    Returns:
      A tree of NamedSharding with the structure of the parameter tree.
    """
    _, state = nnx.split(model)
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda param: param.replace(NamedSharding(mesh, PartitionSpec(*(RULES[axis] for axis in param.axes)))),
            state,
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )
    )


def platform() -> str:
    """Returns the platform (`cpu`, `gpu` or `tpu`) on which the function that is being traced will run.

    The devices of the current mesh determine the platform, because programs are also compiled for absent devices.
    Without a mesh, it is the platform of JAX's default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of batch arrays [rows, ...]."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays that are replicated on all devices."""
    return NamedSharding(mesh, PartitionSpec())


def abstract_arrays(like: Any, shardings: Any) -> Any:
    """Replaces arrays by their shapes, types and shardings.

    Args:
      like: Tree of arrays, or of other leaves with a shape and a dtype.
      shardings: Tree with the sharding of each leaf.
    """
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like, shardings)


def constrain_sharding(x: jax.Array, *spec: Any) -> jax.Array:
    """Constrains the sharding of an array under a mesh.

    Args:
      x: Array.
      *spec: Elements of the PartitionSpec. Activations [rows, ...] use ROWS.

    Returns:
      The constrained array. Returned unchanged without a mesh, or inside shard_map.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:  # With manual axes, x is the local shard.
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def on_each_device(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Maps a function over the shards of the current mesh. Returns it unchanged without a mesh.

    Args:
      function: Function of the shards of a device, with explicit collectives.
      in_specs: PartitionSpec of each argument.
      out_specs: PartitionSpec of each result.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def gather_weight(weight: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Gathers a weight over `fsdp`, so that its matmuls are sharded over rows and `tensor` only.

    Without this constraint, the compiler gathers the activations of all rows if both axes are sharded, and gathers a
    weight once per use.

    Args:
      weight: Sharded weight.
      axes: Names of its axes, keys of RULES.

    Returns:
      The weight, replicated over `fsdp`.
    """
    return constrain_sharding(weight, *(None if RULES[axis] == "fsdp" else RULES[axis] for axis in axes))


def split_outputs(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Shards the outputs of a matmul as the gradient of its weight requires them.

    Without this constraint, the compiler may keep the outputs of all layers in another sharding for the backward pass,
    and exchange them there.

    Args:
      x: Outputs [rows, out].
      axes: Names of the output axes of the weight, keys of RULES.

    Returns:
      The outputs, sharded over `tensor` if one of the output axes of the weight is.
    """
    return constrain_sharding(x, ROWS, "tensor") if "tensor" in [RULES[axis] for axis in axes] else x


def summed_over_rows(
    product: Callable[[jax.Array, jax.Array], jax.Array], shape: Sequence[int], axes: tuple[str, ...], num_inputs: int
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Wraps a function that computes a weight gradient from local rows, so that it sums over the rows of all devices.

    Each device computes the product of its local rows. The products are then summed and scattered in their own type.
    Without this wrapper, the compiler may gather the activations of all rows or all heads of the gradient, or compute
    the full sum on every device.

    Args:
      product: Function of inputs [rows, in] and output gradients [rows, out] that returns [in, out]. Either `in` or
        `out` may be sharded over `tensor`.
      shape: Shape of the weight.
      axes: Names of the axes of the weight, keys of RULES.
      num_inputs: Number of leading axes of the weight that are input axes.

    Returns:
      A function with the arguments of `product` that returns the gradient of the weight, sharded like the weight.
    """
    mesh, split = jax.sharding.get_abstract_mesh(), [RULES[axis] for axis in axes]
    if mesh.empty:
        return lambda x, d_out: product(x, d_out).reshape(shape)
    own = [size // mesh.shape["tensor"] if axis == "tensor" else size for size, axis in zip(shape, split, strict=True)]

    def part(x: jax.Array, d_out: jax.Array) -> jax.Array:
        gradient = product(x, d_out).reshape(own)
        if mesh.shape["fsdp"] > 1 and "fsdp" in split:
            gradient = jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=split.index("fsdp"), tiled=True)
        elif mesh.shape["fsdp"] > 1:  # Some adapter matrices do not have an axis over fsdp.
            gradient = jax.lax.psum(gradient, "fsdp")
        others = [axis for axis in ROWS if axis != "fsdp" and mesh.shape[axis] > 1]
        return jax.lax.psum(gradient, others) if others else gradient

    sides = split[:num_inputs], split[num_inputs:]
    rows = tuple(PartitionSpec(ROWS, "tensor" if "tensor" in side else None) for side in sides)
    return jax.shard_map(part, in_specs=rows, out_specs=PartitionSpec(*split), check_vma=False)


def host_mesh(mesh: Mesh) -> Mesh:
    """Returns a mesh of the local devices, see `host_axes`, or `mesh` if all of its devices belong to one process."""
    if len({device.process_index for device in mesh.devices.flat}) == 1:
        return mesh
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return Mesh(
        np.asarray(local).reshape([*host_axes(mesh.shape, len(local)).values()]),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
    )


def params_on_host(params: Params, mesh: Mesh, dtype: str = "") -> Params:
    """Copies weights to `host_mesh(mesh)`, so that each process has a full copy. All processes must call this function.

    Args:
      params: Weights, sharded over `mesh`.
      mesh: Mesh of all processes.
      dtype: Type of the copy. The weights are converted before they are sent. If empty, they keep their types.

    Returns:
      The weights, sharded over the local devices. Returned unchanged with a single process.
    """
    if jax.process_count() == 1:
        return params
    local_mesh = host_mesh(mesh)
    by_host = sorted(mesh.devices.flatten().tolist(), key=lambda device: device.process_index)
    hosts = Mesh(
        np.asarray(by_host).reshape(-1, *local_mesh.devices.shape),
        ("hosts", *AXES),
        axis_types=(AxisType.Auto,) * (1 + len(AXES)),
    )

    def gather(x: jax.Array) -> jax.Array:
        assert isinstance(x.sharding, NamedSharding)
        copies = jax.device_put(x.astype(dtype or x.dtype), NamedSharding(hosts, x.sharding.spec))
        shards = [shard.data for shard in copies.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(local_mesh, x.sharding.spec), shards)

    return jax.tree.map(gather, params)
