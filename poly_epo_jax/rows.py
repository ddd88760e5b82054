"""The rows that sequences are packed into: as the configuration says or, where it leaves that open, as they need."""

import functools
from collections.abc import Callable, Mapping, Sequence

from poly_epo_jax.batching import PackedBatch, TrainingSequence, pack
from poly_epo_jax.config import Config, longest_sequence

ROW_STEP = 16  # divides rows whose length is not given, so that mesh.tensor may split them

MICROBATCHES = 8
"""In which a minibatch of longest sequences is done, where train.rows_per_device is 0: as others are shorter and share
their prompts, so many parts leave little padding in the last one. All have one shape, which is compiled once."""

LEAST_TOKENS, MOST_TOKENS = 256, 4096
"""Of a microbatch of a device, then: fewer do not pay for reading the weights again, more gain nothing on a CPU."""


def row_tokens(config: Config) -> int:
    """The length of a row: where it is not given, two of the longest sequences fit."""
    return config.train.row_tokens or -(-2 * longest_sequence(config) // ROW_STEP) * ROW_STEP


def rows_per_device(config: Config, mesh_shape: Mapping[str, int]) -> int:
    """The rows of a device whose gradient is taken at once."""
    if config.train.rows_per_device:
        return config.train.rows_per_device
    most, length = fillable_rows(config, mesh_shape), row_tokens(config)
    rows = max(most // MICROBATCHES, min(most, LEAST_TOKENS // length))
    return max(1, min(rows, MOST_TOKENS // length))


def fillable_rows(config: Config, mesh_shape: Mapping[str, int]) -> int:
    """The rows of a device that a minibatch fills where all its sequences are as long as can be."""
    sequences = config.train.prompts_per_minibatch * config.train.num_generations
    return sequences // max(1, row_tokens(config) // longest_sequence(config)) // row_shards(mesh_shape)


def row_shards(mesh_shape: Mapping[str, int]) -> int:
    """Into how many parts a mesh splits rows: its data and fsdp axes do."""
    return mesh_shape["data"] * mesh_shape["fsdp"]


def microbatch_rows(config: Config, mesh_shape: Mapping[str, int]) -> int:
    """The rows whose gradient is taken at once on all devices of a mesh."""
    return rows_per_device(config, mesh_shape) * row_shards(mesh_shape)


def make_pack(
    config: Config, mesh_shape: Mapping[str, int], share_prompts: bool = False
) -> Callable[[Sequence[TrainingSequence]], list[PackedBatch]]:
    """`pack` into the rows of a configuration on a mesh."""
    rows = microbatch_rows(config, mesh_shape)
    return functools.partial(pack, row_tokens=row_tokens(config), rows_per_microbatch=rows, share_prompts=share_prompts)
