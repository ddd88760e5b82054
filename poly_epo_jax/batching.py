"""Packs sequences of any length into rows of a fixed one, so that the device sees few shapes and little padding."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingSequence:
    """A prompt of L tokens with one response of T: each token that is trained carries the same advantage and weight."""

    prompt_ids: Int[np.ndarray, " L"]
    response_ids: Int[np.ndarray, " T"]
    sampler_logprobs: Float[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]  # which tokens are trained
    advantage: float
    weight: float  # of each of these in J, see set_rl.token_weights


class PackedBatch(NamedTuple):
    """Rows of packed sequences, all arrays [rows, length]. Position t holds what concerns the prediction of t + 1.

    `segment_ids` counts a row's sequences from 1, 0 is padding. `weights` is positive where `targets` is a trained
    token and 0 elsewhere. `old_logprobs` are those of the policy before the step's first update; while `on_policy` (a
    scalar) holds, the present policy is that policy, and they are not read. `reference_logprobs` are those of the
    initial policy, read only where a KL term asks for them.
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


def pack(sequences: Sequence[TrainingSequence], row_tokens: int, rows_per_microbatch: int) -> list[PackedBatch]:
    """The sequences as microbatches of one shape [rows_per_microbatch, row_tokens]; the last is filled with padding.

    Longest first, each into the first row with room (first-fit decreasing).

    Raises:
      ValueError: a sequence is longer than a row.
    """
    lengths = [len(s.prompt_ids) + len(s.response_ids) for s in sequences]
    if lengths and max(lengths) > row_tokens:
        raise ValueError(
            f"A sequence has {max(lengths)} tokens, but a row holds train.row_tokens={row_tokens}; raise it to at "
            "least train.max_prompt_tokens + sampling.max_tokens."
        )
    rows: list[list[TrainingSequence]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, free in enumerate(room) if free >= lengths[i]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[row].append(sequences[i])
        room[row] -= lengths[i]
    starts = range(0, len(rows), rows_per_microbatch)
    return [_fill(rows[i : i + rows_per_microbatch], row_tokens, rows_per_microbatch) for i in starts]


def empty_batch(num_rows: int, row_tokens: int) -> PackedBatch:
    """Padding only."""
    ids = (np.zeros((num_rows, row_tokens), np.int32) for _ in range(4))
    values = (np.zeros((num_rows, row_tokens), np.float32) for _ in range(5))
    return PackedBatch(*ids, *values, on_policy=np.array(True))


def _fill(rows: list[list[TrainingSequence]], row_tokens: int, num_rows: int) -> PackedBatch:
    batch = empty_batch(num_rows, row_tokens)
    for r, row in enumerate(rows):
        start = 0
        for segment, sequence in enumerate(row, start=1):
            ids = np.concatenate([sequence.prompt_ids, sequence.response_ids])
            end = start + len(ids)
            batch.tokens[r, start:end] = ids
            batch.positions[r, start:end] = np.arange(len(ids))
            batch.segment_ids[r, start:end] = segment
            batch.targets[r, start : end - 1] = ids[1:]
            response = slice(end - 1 - len(sequence.response_ids), end - 1)
            batch.weights[r, response] = sequence.weight * sequence.loss_mask
            batch.advantages[r, response] = sequence.advantage
            batch.sampler_logprobs[r, response] = sequence.sampler_logprobs
            start = end
    return batch
