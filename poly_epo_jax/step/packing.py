"""Packs sequences of varying length into rows of a fixed length, so that programs have one shape and little padding.

Two sequences of five tokens each, with the same prompt a b, as one row of 12 tokens (0 is padding):

    tokens       a b c d e  a b f g h  0 0      separate prompts
    segment_ids  1 1 1 1 1  2 2 2 2 2  0 0
    positions    0 1 2 3 4  0 1 2 3 4  0 0

    tokens       a  b c d  b f g  0 0 0 0 0     shared prompt: the token after b differs, so each sequence repeats b;
    segment_ids  1  2 2 2  3 3 3  0 0 0 0 0     e and h predict nothing and are omitted
    positions    0  1 2 3  1 2 3  0 0 0 0 0

Tokens attend to themselves and to earlier tokens of their own segment. Segments that share a prompt also attend to the
segment of the prompt.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from poly_epo_jax.config.keys import Config, max_sequence_tokens
from poly_epo_jax.parallel.mesh import row_shards


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingSequence:
    """A prompt of L tokens with one response of T tokens.

    Attributes:
      prompt_ids: Token ids [L] of the prompt.
      response_ids: Token ids [T] of the response.
      sampler_logprobs: Log-probabilities [T] of the response tokens under the sampler's policy, in nats.
      loss_mask: True for the response tokens that are trained, [T].
      advantage: Advantage of all trained tokens.
      weight: Weight of each trained token in the objective J, see `set_rl.token_weights`.
    """

    prompt_ids: Int[np.ndarray, " L"]
    response_ids: Int[np.ndarray, " T"]
    sampler_logprobs: Float[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]
    advantage: float
    weight: float


class PackedBatch(NamedTuple):
    """R packed rows of T tokens. Entry t of a row describes the prediction of the token that follows token t.

    Attributes:
      tokens: Input token ids [R, T].
      positions: Position of each token in its sequence, [R, T]. The positions of segments with a shared prompt continue
        from the prompt's.
      segment_ids: Number of each token's segment, counted from 1 in each row; 0 for padding, [R, T]. A segment is a
        sequence, a shared prompt, or the rest of a sequence whose prompt is shared.
      targets: Token ids to predict, [R, T].
      weights: Weight of each target in the objective J, [R, T]. Positive for trained tokens, 0 elsewhere.
      advantages: Advantage of each target, [R, T].
      sampler_logprobs: Log-probability of each target under the sampler's policy, in nats, [R, T].
      old_logprobs: Log-probability of each target under the policy before the step's first update, [R, T]. Not read if
        `on_policy` is True.
      reference_logprobs: Log-probability of each target under the initial policy, [R, T]. Only read by the KL term.
      on_policy: Scalar. True in the first minibatch of a step, in which the current policy is the old policy.
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


class ZeroAdvantageBatch(PackedBatch):
    """A packed batch whose advantages are all 0. Its metrics are computed, but its backward pass is skipped."""


def pack(
    sequences: Sequence[TrainingSequence],
    row_tokens: int,
    rows_per_microbatch: int,
    share_prompts: bool = False,
) -> list[PackedBatch]:
    """Packs sequences into microbatches of shape [rows_per_microbatch, row_tokens].

    Packing is first-fit decreasing: the longest sequences are placed first, each in the first row with enough free
    space. With `share_prompts`, all sequences of a prompt are placed one after another, if possible in rows that
    already store the prompt. Unused positions, including unused rows of the last microbatch, are padding.

    Args:
      sequences: The sequences to pack.
      row_tokens: Length T of a row, in tokens.
      rows_per_microbatch: Number R of rows in each microbatch.
      share_prompts: Whether a row stores a prompt only once for all its sequences with the same `prompt_ids` array. The
        prompt without its last token forms a separate segment. Its last token starts the segment of each sequence,
        because its target differs between sequences, and the last token of each sequence is omitted.

    Returns:
      Packed microbatches with arrays of shape [R, T].

    Raises:
      ValueError: If a sequence is longer than `row_tokens`.
    """
    longest = max((len(s.prompt_ids) + len(s.response_ids) for s in sequences), default=0)
    if longest > row_tokens:
        raise ValueError(
            f"A sequence has {longest} tokens, but train.row_tokens={row_tokens}; raise it to at least "
            "train.max_prompt_tokens + sampling.max_tokens."
        )
    rows = _first_fit(_families(sequences, share_prompts), row_tokens)
    return [
        _fill(rows[i : i + rows_per_microbatch], row_tokens, rows_per_microbatch)
        for i in range(0, len(rows), rows_per_microbatch)
    ]


@dataclasses.dataclass(frozen=True)
class _Family:
    """Sequences with the same prompt. The first `shared` prompt tokens are stored once per row. 0 disables sharing."""

    shared: int
    sequences: list[TrainingSequence]


def _own_tokens(sequence: TrainingSequence, shared: int) -> int:
    """Returns the length of a sequence's segment.

    With a shared prompt, this is the number of response tokens, because the segment starts with the last prompt token
    and omits the last response token.
    """
    return len(sequence.response_ids) + (0 if shared else len(sequence.prompt_ids))


def _families(sequences: Sequence[TrainingSequence], share_prompts: bool) -> list[_Family]:
    """Groups sequences by prompt if prompts are shared, and otherwise creates one family per sequence.

    The longest families come first.
    """
    by_prompt: dict[int, list[TrainingSequence]] = {}
    for index, sequence in enumerate(sequences):
        is_shared = share_prompts and len(sequence.prompt_ids) > 1
        by_prompt.setdefault(id(sequence.prompt_ids) if is_shared else -1 - index, []).append(sequence)
    families = [
        _Family(len(own[0].prompt_ids) - 1 if key >= 0 else 0, sorted(own, key=lambda s: -len(s.response_ids)))
        for key, own in by_prompt.items()
    ]
    return sorted(
        families, key=lambda family: -family.shared - sum(_own_tokens(s, family.shared) for s in family.sequences)
    )


def _first_fit(families: Sequence[_Family], length: int) -> list[list[_Family]]:
    """Assigns families to rows. A sequence prefers rows that already store its prompt."""
    rows: list[list[_Family]] = []
    free: list[int] = []  # free tokens of each row
    for family in families:
        placed: dict[int, _Family] = {}  # the sequences of this family in each row
        for sequence in family.sequences:
            own = _own_tokens(sequence, family.shared)
            with_prompt = (r for r in placed if free[r] >= own)
            without = (r for r, tokens in enumerate(free) if tokens >= family.shared + own)
            row = next(with_prompt, next(without, len(rows)))
            if row == len(rows):
                rows.append([])
                free.append(length)
            if row not in placed:
                placed[row] = _Family(family.shared, [])
                rows[row].append(placed[row])
                free[row] -= family.shared
            placed[row].sequences.append(sequence)
            free[row] -= own
    return rows


def empty_batch(num_rows: int, row_tokens: int) -> PackedBatch:
    """Creates a batch of padding.

    Args:
      num_rows: Number R of rows.
      row_tokens: Length T of a row, in tokens.

    Returns:
      A batch with arrays of shape [R, T].
    """
    ids = (np.zeros((num_rows, row_tokens), np.int32) for _ in range(4))
    values = (np.zeros((num_rows, row_tokens), np.float32) for _ in range(5))
    return PackedBatch(*ids, *values, on_policy=np.array(True))


def _fill(rows: list[list[_Family]], row_tokens: int, num_rows: int) -> PackedBatch:
    batch = empty_batch(num_rows, row_tokens)
    for r, row in enumerate(rows):
        start, segment = 0, 1
        for family in row:
            if family.shared:
                end = start + family.shared
                batch.tokens[r, start:end] = family.sequences[0].prompt_ids[: family.shared]
                batch.positions[r, start:end] = np.arange(family.shared)
                batch.segment_ids[r, start:end] = segment
                start, segment = end, segment + 1
            for sequence in family.sequences:
                start, segment = _fill_own(batch, r, start, segment, sequence, family.shared), segment + 1
    return batch


def _fill_own(batch: PackedBatch, r: int, start: int, segment: int, sequence: TrainingSequence, shared: int) -> int:
    """Writes the segment of a sequence into row r, beginning at `start`, and returns its end."""
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


ROW_STEP = 16  # automatic row lengths are multiples of it, so that mesh.tensor can shard them

MICROBATCHES = 8
"""Number of microbatches of a minibatch if all sequences have maximum length and train.rows_per_device is 0.

Most sequences are shorter and share their prompts. This number of microbatches then leaves little padding in the last
one. All microbatches have the same shape, which is compiled once.
"""

MIN_MICROBATCH_TOKENS, MAX_MICROBATCH_TOKENS = 256, 4096
"""Limits of the tokens per device in a microbatch if train.rows_per_device is 0.

With fewer tokens, reading the weights dominates. More tokens are not faster on a CPU.
"""


def row_tokens(config: Config) -> int:
    """Returns the row length in tokens. If `train.row_tokens` is 0, two sequences of maximum length fit into a row."""
    return config.train.row_tokens or -(-2 * max_sequence_tokens(config) // ROW_STEP) * ROW_STEP


def rows_per_device(config: Config, mesh_shape: Mapping[str, int]) -> int:
    """Returns the number of rows of a microbatch on each device.

    If `train.rows_per_device` is 0, it is 1 / MICROBATCHES of the rows that a minibatch can fill, within the limits of
    MIN_MICROBATCH_TOKENS and MAX_MICROBATCH_TOKENS.

    Args:
      config: The configuration.
      mesh_shape: Size of each mesh axis.
    """
    if config.train.rows_per_device:
        return config.train.rows_per_device
    max_rows, length = fillable_rows(config, mesh_shape), row_tokens(config)
    rows = max(max_rows // MICROBATCHES, min(max_rows, MIN_MICROBATCH_TOKENS // length))
    return max(1, min(rows, MAX_MICROBATCH_TOKENS // length))


def fillable_rows(config: Config, mesh_shape: Mapping[str, int]) -> int:
    """Returns the number of rows per device that a minibatch fills if all its sequences have maximum length.

    Args:
      config: The configuration.
      mesh_shape: Size of each mesh axis.
    """
    sequences = config.train.prompts_per_minibatch * config.train.num_generations
    return sequences // max(1, row_tokens(config) // max_sequence_tokens(config)) // row_shards(mesh_shape)


def microbatch_rows(config: Config, mesh_shape: Mapping[str, int]) -> int:
    """Returns the number of rows of a microbatch on all devices of the mesh.

    Args:
      config: The configuration.
      mesh_shape: Size of each mesh axis.
    """
    return rows_per_device(config, mesh_shape) * row_shards(mesh_shape)


def make_pack(
    config: Config, mesh_shape: Mapping[str, int], share_prompts: bool = False
) -> Callable[[Sequence[TrainingSequence]], list[PackedBatch]]:
    """Binds `pack` to the row length and microbatch size of a run.

    Args:
      config: The configuration of the run.
      mesh_shape: Size of each mesh axis.
      share_prompts: Whether prompts are stored once per row, see `pack`.

    Returns:
      A function that packs sequences into microbatches.
    """
    return functools.partial(
        pack,
        row_tokens=row_tokens(config),
        rows_per_microbatch=microbatch_rows(config, mesh_shape),
        share_prompts=share_prompts,
    )
