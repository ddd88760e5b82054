"""What the tokens of packed rows see, from which every form of the attention derives the blocks that it must visit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

MASK_VALUE = -1e30  # the score of an invisible key; finite, so that a block without visible keys gives no NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """A token sees the tokens from `first` to itself, and those of an earlier prompt, which other segments see too.

    Attributes:
      first: the start of the token's segment, a run of equal ids; for padding, the token itself. It never decreases
        along a row.
      prompt, prompt_end: the prompt's first token and the one after its last; equal if nothing is shared.
      longest: no segment has more tokens; 0: only the row bounds them. It is a promise of the code that packs the rows:
        a form that lays out its work by it does not see what is farther away.
    """

    first: Any  # Int[Array, "B T"], or what JAX puts in its place
    prompt: Any  # likewise
    prompt_end: Any
    longest: int = dataclasses.field(default=0, metadata={"static": True})

    def lengthened(self, block: int) -> "Segments":
        """The rows padded at their ends to whole blocks."""
        rows, length = self.first.shape
        end = jnp.arange(length, length + -length % block, dtype=self.first.dtype)
        end = jnp.broadcast_to(end, (rows, len(end)))
        return jax.tree.map(lambda x: jnp.concatenate([x, end], axis=1), self)

    def first_key_blocks(self, query_block: int, key_block: int) -> Int[Array, "B I"]:
        """For each block of queries, the first block of keys that one of them sees; they see all from there on."""
        return self.first[:, ::query_block] // key_block

    def last_query_blocks(self, query_block: int, key_block: int) -> Int[Array, "B J"]:
        """For each block of keys, the last block of queries that sees one of them; all up to there do."""
        ends = jnp.arange(key_block - 1, self.first.shape[1], key_block)
        last = jnp.sum(self.first[:, None] <= ends[None, :, None], axis=-1, dtype=jnp.int32) - 1
        return last // query_block


def make_segments(
    segment_ids: Int[Array, "B T"], longest: int = 0, positions: Int[Array, "B T"] | None = None
) -> Segments:
    """What the tokens of rows with these ids see; 0 is padding.

    Args:
      positions: of the tokens in their sequences. A segment that begins at a position above 0 continues the nearest
        segment to its left that begins at 0, and sees the part of it that comes before its own first position. None: no
        segment does.
    """
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], [(0, 0), (1, 0)], constant_values=True)
    begins |= segment_ids == 0
    first = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    if positions is None:
        return Segments(first, first, first, longest)
    prompt = jax.lax.cummax(jnp.where(positions == 0, index, 0), axis=1)
    return Segments(first, prompt, prompt + positions - (index - first), longest)


def whole_blocks(block: int, *arrays: Array) -> list[Array]:
    """Arrays [B, T, ...] with T lengthened by zeros to a multiple of `block`."""
    return [jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2)) for x in arrays]
