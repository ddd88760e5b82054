"""How many elements a run trains: of the adapter, where it has one, or of the weights that train.trainable names."""

import math
from collections.abc import Mapping

from poly_epo_jax.config import Config
from poly_epo_jax.model import flops
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.partition import is_trainable
from poly_epo_jax.model.qwen3 import declared_weights
from poly_epo_jax.parallel.mesh import RULES


def trained_sizes(config: Config, shape: ModelConfig) -> list[int]:
    """Elements of each matrix that is trained."""
    if shape.lora_targets:
        return list(flops.adapter_sizes(shape).values())
    return [size for path, size in flops.matrix_sizes(shape).items() if is_trainable(path, config.train.trainable)]


def trained_elements(config: Config, shape: ModelConfig, mesh: Mapping[str, int]) -> int:
    """All of them, on each device of a mesh, which splits every matrix, but of an adapter's parts one side alone."""
    if not shape.lora_targets:
        return sum(trained_sizes(config, shape)) // (mesh["fsdp"] * mesh["tensor"])
    declared = declared_weights(shape)
    return sum(
        size // math.prod(mesh[split] for axis in declared[path].axes if (split := RULES[axis]))
        for path, size in flops.adapter_sizes(shape).items()
    )


def gradient_passes(config: Config, shape: ModelConfig) -> float:
    """The FLOPs of a gradient by those of the forward pass: 3 where all weights are trained.

    The backward pass multiplies as much as the forward pass for the gradients of activations, and as much again for
    those of weights, of the ones that are trained.
    """
    all_sizes = [*flops.matrix_sizes(shape).values(), *flops.adapter_sizes(shape).values()]
    return 2 + sum(trained_sizes(config, shape)) / sum(all_sizes)
