"""Visibility of tokens in packed rows, from which all attention implementations derive the blocks that they visit.

Training packs several sequences into one row, so that little padding is needed. A token must not see other sequences of
its row. If several generations of a prompt are in the same row, the prompt can be stored once. For example, a prompt of
4 tokens with generations of 3 and 2 tokens is stored as

    segment_ids  1 1 1  2 2 2  3 3  0
    positions    0 1 2  3 4 5  3 4  0

Segments 2 and 3 start at position 3, so they see the first 3 tokens of the nearest segment to their left that starts at
0. They start with the last prompt token, whose target differs between generations, and omit the last generated token,
which is only a target.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

MASK_VALUE = -1e30  # Score of invisible keys. It is finite, so that blocks without visible keys do not produce NaN.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """Visible tokens of each token in packed rows.

    A token sees the tokens from `first` to itself, and the tokens from `prompt` to `prompt_end - 1`.

    Attributes:
      first: Index in the row of the first token of the segment, int32 [B, T]. For padding, the index of the token
        itself. Values do not decrease along a row.
      prompt: Index of the first token of the shared prompt, int32 [B, T].
      prompt_end: Index after the last visible token of the shared prompt, int32 [B, T]. Equal to `prompt` if no prompt
        is shared.
      max_segment_tokens: Maximum number of tokens of a segment. 0 means that only the row length limits segments. The
        code that packs the rows guarantees this limit: kernels do not visit keys beyond it.
    """

    first: Any  # Int[Array, "B T"], or a leaf that JAX substitutes for it, as in the other fields.
    prompt: Any
    prompt_end: Any
    max_segment_tokens: int = dataclasses.field(default=0, metadata={"static": True})

    def padded(self, block: int) -> "Segments":
        """Returns the segments of rows that are padded at the end to a multiple of `block` tokens."""
        rows, length = self.first.shape
        end = jnp.arange(length, length + -length % block, dtype=self.first.dtype)
        end = jnp.broadcast_to(end, (rows, len(end)))
        return jax.tree.map(lambda x: jnp.concatenate([x, end], axis=1), self)

    def within(self, window: int | Int[Array, ""], positions: Int[Array, "B T"] | None) -> "Segments":
        """Restricts the visible tokens of each token to the last ones.

        Args:
          window: Number of visible tokens, including the token itself. It may be traced.
          positions: Position of each token in its sequence, or None if prompts are not shared.

        Returns:
          The restricted segments.
        """
        index = jnp.arange(self.first.shape[1], dtype=jnp.int32)[None]
        first = jnp.maximum(self.first, index - window + 1)
        if positions is None:
            return dataclasses.replace(self, first=first, prompt=first, prompt_end=first)
        # The token at position p of the shared prompt has the index prompt + p.
        prompt = jnp.minimum(self.prompt + jnp.maximum(positions - window + 1, 0), self.prompt_end)
        return dataclasses.replace(self, first=first, prompt=prompt)

    def first_key_blocks(self, query_block: int, key_block: int) -> Int[Array, "B I"]:
        """Returns the first visible key block of each query block. Shared prompts are not taken into account.

        Args:
          query_block: Number of tokens per query block.
          key_block: Number of tokens per key block.

        Returns:
          Indices of key blocks. Each query block sees all key blocks from this index to its own position.
        """
        return self.first[:, ::query_block] // key_block

    def last_query_blocks(self, query_block: int, key_block: int) -> Int[Array, "B J"]:
        """Returns the last query block that sees each key block. Shared prompts are not taken into account.

        Args:
          query_block: Number of tokens per query block.
          key_block: Number of tokens per key block.

        Returns:
          Indices of query blocks. All query blocks from the position of the key block to this index see it.
        """
        ends = jnp.arange(key_block - 1, self.first.shape[1], key_block)
        last = jnp.sum(self.first[:, None] <= ends[None, :, None], axis=-1, dtype=jnp.int32) - 1
        return last // query_block


def make_segments(
    segment_ids: Int[Array, "B T"], max_segment_tokens: int = 0, positions: Int[Array, "B T"] | None = None
) -> Segments:
    """Computes the visible tokens of packed rows.

    Args:
      segment_ids: Segment of each token. A segment is a run of equal ids, and 0 marks padding.
      max_segment_tokens: Maximum number of tokens of a segment, or 0 for no limit other than the row length.
      positions: Position of each token in its sequence. A segment that starts at a position above 0 continues the
        nearest segment to its left that starts at 0, and sees the tokens of that segment before this position. If None,
        prompts are not shared.

    Returns:
      The segments.
    """
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], [(0, 0), (1, 0)], constant_values=True)
    begins |= segment_ids == 0
    first = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    if positions is None:
        return Segments(first, first, first, max_segment_tokens)
    prompt = jax.lax.cummax(jnp.where(positions == 0, index, 0), axis=1)
    return Segments(first, prompt, prompt + positions - (index - first), max_segment_tokens)


def pad_to_blocks(block: int, *arrays: Array) -> list[Array]:
    """Pads arrays [B, T, ...] with zeros to a multiple of `block` along axis T.

    Args:
      block: Number of tokens per block.
      *arrays: Arrays to pad.

    Returns:
      The padded arrays.
    """
    return [jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2)) for x in arrays]
