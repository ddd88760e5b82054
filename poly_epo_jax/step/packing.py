"""Packs sequences of any length into rows of a fixed length, so that the device sees few shapes and little padding."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from poly_epo_jax.config.keys import Config, longest_sequence


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingSequence:
    """A prompt of L tokens with one response of T tokens; all trained tokens have the same advantage and weight."""

    prompt_ids: Int[np.ndarray, " L"]
    response_ids: Int[np.ndarray, " T"]
    sampler_logprobs: Float[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]  # which tokens are trained
    advantage: float
    weight: float  # of each trained token in J, see set_rl.token_weights


class PackedBatch(NamedTuple):
    """Rows of packed sequences, all arrays [rows, length]. Position t holds the values for predicting token t + 1.

    `segment_ids` numbers a row's sequences from 1; 0 is padding. Where sequences share their prompt, the prompt is a
    segment of its own, and the `positions` of their own segments continue from it. `weights` is positive where
    `targets` is a trained token and 0 elsewhere. `old_logprobs` are those of the policy before the step's first update;
    they are not read while `on_policy` (a scalar) is true, because the current policy is then that policy.
    `reference_logprobs` are those of the initial policy, and are read only by a KL term.
    """

    tokens: Int[np.ndarray | jax.Array, "R T"]
    positions: Int[np.ndarray | jax.Array, "R T"]
    segment_ids: Int[np.ndarray | jax.Array, "R T"]
    targets: Int[np.ndarray | jax.Array, "R T"]
    weights: Float[np.ndarray | jax.Array, "R T"]
    advantages: Float[np.ndarray | jax.Array, "R T"]
    sampler_logprobs: Float[np.ndarray | jax.Array, "R T"]
    old_logprobs: Float[np.ndarray | jax.Array, "R T"]
    reference_logprobs: Float[np.ndarray | jax.Array, "R T"]
    on_policy: Bool[np.ndarray | jax.Array, ""]


class SilentBatch(PackedBatch):
    """A batch without a gradient, because all its advantages are 0: it is measured but not trained on."""


def pack(
    sequences: Sequence[TrainingSequence],
    row_tokens: int,
    rows_per_microbatch: int,
    share_prompts: bool = False,
) -> list[PackedBatch]:
    """The sequences as microbatches of one shape [rows_per_microbatch, row_tokens]; the last is filled with padding.

    The longest sequences come first, and each goes into the first row with room (first-fit decreasing).

    Args:
      share_prompts: store the prompt once per row for sequences whose `prompt_ids` are the same array. The prompt's
        last token predicts a different token in each of them, so it begins each one's own segment; each sequence's last
        token is left out.

    Raises:
      ValueError: a sequence is longer than a row.
    """
    longest = max((len(s.prompt_ids) + len(s.response_ids) for s in sequences), default=0)
    if longest > row_tokens:
        raise ValueError(
            f"A sequence has {longest} tokens, but a row holds train.row_tokens={row_tokens}; raise it to at "
            "least train.max_prompt_tokens + sampling.max_tokens."
        )
    rows = _first_fit(_families(sequences, share_prompts), row_tokens)
    starts = range(0, len(rows), rows_per_microbatch)
    return [_fill(rows[i : i + rows_per_microbatch], row_tokens, rows_per_microbatch) for i in starts]


@dataclasses.dataclass(frozen=True)
class _Family:
    """Sequences in one row: `shared` tokens of their prompt, stored once, and each sequence's own tokens."""

    shared: int
    sequences: list[TrainingSequence]


def _own_tokens(sequence: TrainingSequence, shared: int) -> int:
    return len(sequence.response_ids) + (0 if shared else len(sequence.prompt_ids))


def _families(sequences: Sequence[TrainingSequence], share_prompts: bool) -> list[_Family]:
    """Sequences grouped by prompt, or each by itself; the longest come first."""
    by_prompt: dict[int, list[TrainingSequence]] = {}
    for place, sequence in enumerate(sequences):
        is_shared = share_prompts and len(sequence.prompt_ids) > 1
        by_prompt.setdefault(id(sequence.prompt_ids) if is_shared else -1 - place, []).append(sequence)
    families = [
        _Family(len(own[0].prompt_ids) - 1 if key >= 0 else 0, sorted(own, key=lambda s: -len(s.response_ids)))
        for key, own in by_prompt.items()
    ]
    return sorted(
        families, key=lambda family: -family.shared - sum(_own_tokens(s, family.shared) for s in family.sequences)
    )


def _first_fit(families: Sequence[_Family], length: int) -> list[list[_Family]]:
    """Rows of families. A sequence that fits into no row with its prompt goes to the first with room for both."""
    rows: list[list[_Family]] = []
    room: list[int] = []
    for family in families:
        here: dict[int, _Family] = {}  # the family's part of a row, by row
        for sequence in family.sequences:
            own = _own_tokens(sequence, family.shared)
            with_prompt = (r for r in here if room[r] >= own)
            without = (r for r, free in enumerate(room) if free >= family.shared + own)
            row = next(with_prompt, next(without, len(rows)))
            if row == len(rows):
                rows.append([])
                room.append(length)
            if row not in here:
                here[row] = _Family(family.shared, [])
                rows[row].append(here[row])
                room[row] -= family.shared
            here[row].sequences.append(sequence)
            room[row] -= own
    return rows


def empty_batch(num_rows: int, row_tokens: int) -> PackedBatch:
    """A batch of padding only."""
    ids = (np.zeros((num_rows, row_tokens), np.int32) for _ in range(4))
    values = (np.zeros((num_rows, row_tokens), np.float32) for _ in range(5))
    return PackedBatch(*ids, *values, on_policy=np.array(True))


def _fill(rows: list[list[_Family]], row_tokens: int, num_rows: int) -> PackedBatch:
    batch = empty_batch(num_rows, row_tokens)
    for r, row in enumerate(rows):
        start, segment = 0, 1
        for family in row:
            shared = family.shared
            if shared:
                end = start + shared
                batch.tokens[r, start:end] = family.sequences[0].prompt_ids[:shared]
                batch.positions[r, start:end] = np.arange(shared)
                batch.segment_ids[r, start:end] = segment
                start, segment = end, segment + 1
            for sequence in family.sequences:
                start, segment = _fill_own(batch, r, start, segment, sequence, shared), segment + 1
    return batch


def _fill_own(batch: PackedBatch, r: int, start: int, segment: int, sequence: TrainingSequence, shared: int) -> int:
    """Writes a sequence's own tokens into row r, from `start` on; returns where they end."""
    ids = np.concatenate([sequence.prompt_ids, sequence.response_ids])[shared:]
    num_targets, end = len(ids) - 1, start + _own_tokens(sequence, shared)
    batch.tokens[r, start:end] = ids[: end - start]
    batch.positions[r, start:end] = np.arange(shared, shared + end - start)
    batch.segment_ids[r, start:end] = segment
    batch.targets[r, start : start + num_targets] = ids[1:]
    response = slice(start + num_targets - len(sequence.response_ids), start + num_targets)
    batch.weights[r, response] = sequence.weight * sequence.loss_mask
    batch.advantages[r, response] = sequence.advantage
    batch.sampler_logprobs[r, response] = sequence.sampler_logprobs
    return end


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
