"""Which meshes fit a number of devices and a model, and the nearest one that does if a mesh does not fit."""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

from poly_epo_jax.config.keys import ConfigError

AXES = ("data", "fsdp", "tensor")
RULES: dict[str, str | None] = {
    "hidden_size": "fsdp",
    "num_heads": "tensor",
    "num_kv_heads": "tensor",
    "mlp_size": "tensor",
    "vocab_size": "tensor",
    "head_dim": None,
    "num_layers": None,
    "norm": None,
    "lora_rank": None,
}
"""Which mesh axis splits each axis of a weight. A weight's axes are named after the fields of ModelConfig that give
their sizes."""


def fill_mesh(asked: Mapping[str, Any], num_devices: int) -> dict[str, int]:
    """The sizes of AXES, with -1 replaced by the number of devices that remain.

    Args:
      asked: the `mesh` section of a configuration, or a size for each of AXES.

    Raises:
      ConfigError: the devices cannot be arranged like this.
    """
    sizes = {axis: asked[axis] for axis in AXES}
    stated = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    fixed = {axis: size for axis, size in sizes.items() if size != -1}
    if len(open_axes) > 1 or any(size < 1 for size in fixed.values()):
        raise ConfigError(f"{stated}: every axis must be a positive size, and at most one may be -1.")
    used = prod(fixed.values())
    if used > num_devices or (open_axes and num_devices % used):
        raise ConfigError(
            f"{stated} takes {'a multiple of ' if open_axes else ''}{used} devices, but there are {num_devices}; "
            f"{_advice(fixed, num_devices, lambda mesh: True)}."
        )
    return {axis: num_devices // used if size == -1 else size for axis, size in sizes.items()}


def check_mesh(
    asked: Mapping[str, Any], mesh_shape: Mapping[str, int], model_sizes: Mapping[str, Any], row_tokens: int
) -> None:
    """Refuses a mesh that the model or a row cannot be split over.

    Args:
      asked: the `mesh` section of the configuration; the advice keeps the axes that it fixes, as far as possible.
      mesh_shape: devices along data, fsdp and tensor.
      model_sizes: the fields of the model's ModelConfig.
      row_tokens: the configuration's train.row_tokens.

    Raises:
      ConfigError: naming the axis, what it must divide, and the nearest mesh that does.
    """
    splits = [(axis, f"the model's {field}", model_sizes[field]) for field, axis in RULES.items() if axis]
    splits.append(("tensor", "train.row_tokens", row_tokens))

    def works(mesh: Mapping[str, int]) -> bool:
        return all(size % mesh[axis] == 0 for axis, _, size in splits)

    for axis, name, size in splits:
        if size % mesh_shape[axis]:
            fixed = {axis: size for axis, size in mesh_shape.items() if asked[axis] != -1}
            raise ConfigError(
                f"mesh.{axis}={mesh_shape[axis]} does not divide {name}={size}; "
                f"{_advice(fixed, prod(mesh_shape.values()), works)}."
            )


def nearest_mesh(
    wanted: Mapping[str, int], num_devices: int, works: Callable[[Mapping[str, int]], bool]
) -> dict[str, int]:
    """Of the meshes of `num_devices` devices that work, the one with the smallest total change of the wanted axes.

    Ties go to more fsdp, then to less tensor. A mesh of data alone must work.
    """

    def distance(mesh: Mapping[str, int]) -> tuple[int, int, int]:
        return sum(abs(mesh[axis] - size) for axis, size in wanted.items()), -mesh["fsdp"], mesh["tensor"]

    return min(filter(works, _meshes(num_devices)), key=distance)


def _meshes(num_devices: int) -> Iterator[dict[str, int]]:
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for tensor in divisors:
        for fsdp in divisors:
            if num_devices % (tensor * fsdp) == 0:
                yield {"data": num_devices // (tensor * fsdp), "fsdp": fsdp, "tensor": tensor}


def _advice(wanted: Mapping[str, int], num_devices: int, works: Callable[[Mapping[str, int]], bool]) -> str:
    mesh = nearest_mesh(wanted, num_devices, works)
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    return f"the nearest mesh that works on {num_devices} device{'s' * (num_devices > 1)} is {sizes}"
