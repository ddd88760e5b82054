"""The rows that sequences are packed into: as configured or, where the configuration leaves this open, as needed."""

import functools
from collections.abc import Callable, Mapping, Sequence

from poly_epo_jax.batching import PackedBatch, TrainingSequence, pack
from poly_epo_jax.config import Config, longest_sequence

ROW_STEP = 16  # divides the length of rows if it is not configured, so that mesh.tensor may split them

MICROBATCHES = 8
"""The number of microbatches of a minibatch of longest sequences, if train.rows_per_device is 0. Others are shorter and
share their prompts, so this many leave little padding in the last one. All have one shape, which is compiled once."""

LEAST_TOKENS, MOST_TOKENS = 256, 4096
"""Limits of a device's microbatch in that case: fewer tokens are not worth reading the weights again, and more gain
nothing on a CPU."""


def row_tokens(config: Config) -> int:
    """The length of a row; if it is not configured, two of the longest sequences fit."""
    return config.train.row_tokens or -(-2 * longest_sequence(config) // ROW_STEP) * ROW_STEP


def rows_per_device(config: Config, mesh_shape: Mapping[str, int]) -> int:
    """The rows per device whose gradient is computed at once."""
    if config.train.rows_per_device:
        return config.train.rows_per_device
    most, length = fillable_rows(config, mesh_shape), row_tokens(config)
    rows = max(most // MICROBATCHES, min(most, LEAST_TOKENS // length))
    return max(1, min(rows, MOST_TOKENS // length))


def fillable_rows(config: Config, mesh_shape: Mapping[str, int]) -> int:
    """The rows per device that a minibatch fills if all its sequences are as long as possible."""
    sequences = config.train.prompts_per_minibatch * config.train.num_generations
    return sequences // max(1, row_tokens(config) // longest_sequence(config)) // row_shards(mesh_shape)


def row_shards(mesh_shape: Mapping[str, int]) -> int:
    """The number of parts into which the data and fsdp axes of a mesh split the rows."""
    return mesh_shape["data"] * mesh_shape["fsdp"]


def microbatch_rows(config: Config, mesh_shape: Mapping[str, int]) -> int:
    """The rows whose gradient is computed at once on all devices of a mesh."""
    return rows_per_device(config, mesh_shape) * row_shards(mesh_shape)


def make_pack(
    config: Config, mesh_shape: Mapping[str, int], share_prompts: bool = False
) -> Callable[[Sequence[TrainingSequence]], list[PackedBatch]]:
    """`pack`, bound to the rows of a configuration on a mesh."""
    rows = microbatch_rows(config, mesh_shape)
    return functools.partial(pack, row_tokens=row_tokens(config), rows_per_microbatch=rows, share_prompts=share_prompts)
