"""Mesh axes and sharding rules, and validation of meshes against the number of devices and the model."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from math import gcd, prod
from typing import Any

from poly_epo_jax.config.keys import ConfigError

AXES = ("data", "fsdp", "tensor", "expert")
ROWS = ("data", "fsdp", "expert")
"""Mesh axes over which the rows of a batch are sharded."""

RULES: dict[str, str | None] = {
    "hidden_size": "fsdp",
    "num_heads": "tensor",
    "num_kv_heads": "tensor",
    "mlp_size": "tensor",
    "vocab_size": "tensor",
    "num_experts": "expert",
    "linear_key_heads": "tensor",
    "linear_value_heads": "tensor",
    "head_dim": None,
    "query_width": None,
    "linear_value_dim": None,
    "linear_channels": None,
    "conv_size": None,
    "num_layers": None,
    "norm": None,
    "lora_rank": None,
}
"""Mesh axis over which each axis of a weight is sharded, or None for unsharded axes. The axes of weights are named
after the ModelConfig fields that contain their sizes, except for `norm`, the axis of norm weights. For example,
`layers.q` has the axes (num_layers, hidden_size, num_heads, head_dim), so its PartitionSpec is (None, "fsdp",
"tensor", None)."""


def shown_axes(mesh_shape: Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes of the axes that messages show. `expert` is only shown if it is above 1."""
    return {axis: size for axis, size in mesh_shape.items() if axis != "expert" or size > 1}


def row_shards(mesh_shape: Mapping[str, int]) -> int:
    """Returns the number of shards of the rows of a batch."""
    return prod(mesh_shape[axis] for axis in ROWS)


def host_axes(mesh_shape: Mapping[str, int], num_local: int) -> dict[str, int]:
    """Returns the sizes of the mesh axes of one process, whose sampler and servers use a full copy of the weights.

    The size of the `expert` axis is the greatest common divisor of its size in `mesh_shape` and the number of local
    devices. The axes `tensor` and `fsdp` are sized in the same way from the remaining devices. The rest is `data`.

    Args:
      mesh_shape: Number of devices of all processes along each mesh axis.
      num_local: Number of devices of the process.
    """
    sizes = {}
    for axis in ("expert", "tensor", "fsdp"):
        sizes[axis] = gcd(mesh_shape[axis], num_local // prod(sizes.values()))
    return {axis: sizes.get(axis, num_local // prod(sizes.values())) for axis in AXES}


def fill_mesh(requested: Mapping[str, Any], num_devices: int) -> dict[str, int]:
    """Returns the sizes of the mesh axes, with -1 replaced by the number of remaining devices.

    Args:
      requested: The `mesh` section of a configuration, or a mapping with a size for each of AXES.
      num_devices: Number of available devices.

    Returns:
      The size of each axis. Their product may be smaller than `num_devices` if no size is -1.

    Raises:
      ConfigError: If the sizes are invalid or do not match the number of devices.
    """
    sizes = {axis: requested[axis] for axis in AXES}
    stated = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    fixed = {axis: size for axis, size in sizes.items() if size != -1}
    if len(open_axes) > 1 or any(size < 1 for size in fixed.values()):
        raise ConfigError(f"{stated}: every axis must have a positive size, and at most one may be -1.")
    used = prod(fixed.values())
    if used > num_devices or (open_axes and num_devices % used):
        raise ConfigError(
            f"{stated} takes {'a multiple of ' if open_axes else ''}{used} devices, but there are {num_devices}; "
            f"{_advice(fixed, num_devices, lambda mesh: True)}."
        )
    return {axis: num_devices // used if size == -1 else size for axis, size in sizes.items()}


def check_mesh(
    requested: Mapping[str, Any], mesh_shape: Mapping[str, int], model_sizes: Mapping[str, Any], row_tokens: int
) -> None:
    """Verifies that the weights of a model and the rows of a batch can be sharded over a mesh.

    Args:
      requested: The `mesh` section of the configuration. The suggested mesh changes its fixed axes as little as
        possible.
      mesh_shape: Number of devices along each mesh axis.
      model_sizes: Fields of the ModelConfig.
      row_tokens: Number of tokens per row, train.row_tokens.

    Raises:
      ConfigError: If a mesh axis does not divide a size. The message contains the nearest valid mesh.
    """
    sizes = {**model_sizes, "num_experts": model_sizes["num_experts"] or 1}
    splits = [(axis, f"the model's {field}", sizes[field]) for field, axis in RULES.items() if axis]
    splits.append(("tensor", "train.row_tokens", row_tokens))

    def is_valid(mesh: Mapping[str, int]) -> bool:
        return all(size % mesh[axis] == 0 for axis, _, size in splits)

    for axis, name, size in splits:
        if size % mesh_shape[axis]:
            fixed = {axis: size for axis, size in mesh_shape.items() if requested[axis] != -1}
            raise ConfigError(
                f"mesh.{axis}={mesh_shape[axis]} does not divide {name}={size}; "
                f"{_advice(fixed, prod(mesh_shape.values()), is_valid)}."
            )


def nearest_mesh(
    requested: Mapping[str, int], num_devices: int, is_valid: Callable[[Mapping[str, int]], bool]
) -> dict[str, int]:
    """Returns the valid mesh of `num_devices` devices that changes the requested axis sizes the least.

    Args:
      requested: Requested size of some axes.
      num_devices: Number of devices of the mesh.
      is_valid: Function that returns True for valid meshes. It must accept a mesh with `data` as its only axis larger
        than 1.

    Returns:
      The mesh with the smallest sum of absolute changes. Ties prefer smaller `expert`, then larger `fsdp`, then
      smaller `tensor`.
    """

    def distance(mesh: Mapping[str, int]) -> tuple[int, int, int, int]:
        changes = sum(abs(mesh[axis] - size) for axis, size in requested.items())
        return changes, mesh["expert"], -mesh["fsdp"], mesh["tensor"]

    return min(filter(is_valid, _meshes(num_devices)), key=distance)


def _meshes(num_devices: int) -> Iterator[dict[str, int]]:
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for fsdp, expert, tensor in itertools.product(divisors, repeat=3):
        if num_devices % (fsdp * expert * tensor) == 0:
            yield {
                "data": num_devices // (fsdp * expert * tensor),
                "fsdp": fsdp,
                "tensor": tensor,
                "expert": expert,
            }


def _advice(requested: Mapping[str, int], num_devices: int, is_valid: Callable[[Mapping[str, int]], bool]) -> str:
    mesh = nearest_mesh(requested, num_devices, is_valid)
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    return f"the nearest mesh that works on {num_devices} device{'s' * (num_devices > 1)} is {sizes}"
