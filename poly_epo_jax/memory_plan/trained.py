"""How many elements a run trains: those of its adapter if it has one, else of the weights in train.trainable."""

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
    """Trained elements on each device of a mesh. It splits every matrix, but an adapter's matrices on one side only."""
    if not shape.lora_targets:
        return sum(trained_sizes(config, shape)) // (mesh["fsdp"] * mesh["tensor"])
    declared = declared_weights(shape)
    return sum(
        size // math.prod(mesh[split] for axis in declared[path].axes if (split := RULES[axis]))
        for path, size in flops.adapter_sizes(shape).items()
    )


def gradient_passes(config: Config, shape: ModelConfig) -> float:
    """The FLOPs of a gradient divided by those of the forward pass: 3 if all weights are trained.

    The backward pass does as many multiplications as the forward pass for the gradients of activations, and as many
    again for the gradients of weights, counting only the weights that are trained.
    """
    all_sizes = [*flops.matrix_sizes(shape).values(), *flops.adapter_sizes(shape).values()]
    return 2 + sum(trained_sizes(config, shape)) / sum(all_sizes)
