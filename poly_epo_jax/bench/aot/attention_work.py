"""Computes the FLOPs of attention kernels from their input rows, because they cannot be read from a program's text."""

import collections
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from poly_epo_jax.model.attention import splash, triton
from poly_epo_jax.model.config import ModelConfig

PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3, "forward_kernel": 2, "key_kernel": 4, "query_kernel": 3}
"""Number of matmuls over the head dimension per pair of tokens, by a substring of the kernel's name.

The backward pass requires five matmuls. If two kernels share it, both recompute the scores and their gradients.
"""

BLOCKS = {
    "splash": (splash.BLOCK, splash.BLOCK),
    "packed_attention_forward": (triton.FORWARD[2].own, triton.FORWARD[2].step),
    "packed_attention": (triton.BACKWARD[2].own, triton.BACKWARD[2].step),
}
"""Numbers of queries and keys per block for bfloat16, by the prefix of the kernel's name.

Kernels compute entire blocks.
"""


def kernel_flops(config: ModelConfig, segment_ids: Int[np.ndarray, "R T"], heads: int, kernel: str) -> float:
    """Computes the FLOPs of one execution of a kernel.

    Args:
      config: Configuration of the model.
      segment_ids: Segment ids [R, T] of the packed rows, 0 for padding.
      heads: Number of query heads that the kernel processes.
      kernel: Name of the kernel.

    Returns:
      The FLOPs, or 0 if the kernel is not an attention kernel.
    """
    products = next((count for name, count in PRODUCTS.items() if name in kernel), 0)
    return 2.0 * products * config.head_dim * heads * kernel_pairs(config, segment_ids, kernel)


def kernel_pairs(config: ModelConfig, segment_ids: Int[np.ndarray, "R T"], kernel: str) -> float:
    """Counts the query-key pairs in all blocks that a kernel computes, on average over the layers with attention.

    Args:
      config: Configuration of the model, which defines the windows of the layers.
      segment_ids: Segment ids [R, T] of the packed rows, 0 for padding.
      kernel: Name of the kernel.

    Returns:
      The number of pairs, or 0 if the kernel is not an attention kernel.
    """
    block = next((block for name, block in BLOCKS.items() if kernel.startswith(name)), None)
    if block is None:
        return 0.0
    counts = collections.Counter(config.attention_windows)
    visited = (count * visited_pairs(segment_ids, *block, window) for window, count in counts.items())
    return sum(visited) / max(counts.total(), 1)


def visited_pairs(segment_ids: Int[np.ndarray, "R T"], query_block: int, key_block: int, window: int = 0) -> int:
    """Counts the query-key pairs in all blocks that contain at least one visible pair.

    A pair is visible if query and key belong to the same segment, and the key is not after the query and within the
    window of the layer.

    Args:
      segment_ids: Segment ids [R, T] of the packed rows, 0 for padding.
      query_block: Number of queries per block.
      key_block: Number of keys per block.
      window: Number of tokens that a token sees, including itself. 0 disables the window.
    """
    visited = 0
    for row in segment_ids:
        starts = _starts(row, window)
        for begin in range(0, len(row), query_block):
            end = min(begin + query_block, len(row))
            # Of all queries in the block, the segment of the first one starts earliest.
            visited += query_block * key_block * int(-(-end // key_block) - starts[begin] // key_block)
    return visited


def own_pairs(segment_ids: Int[np.ndarray, "R T"], windows: Sequence[int] = (0,)) -> float:
    """Counts the visible query-key pairs, on average over layers with these windows. Padding tokens see themselves."""
    counts = collections.Counter(windows).items()
    pairs = (n * (np.arange(len(row)) - _starts(row, w) + 1).sum() for w, n in counts for row in segment_ids)
    return float(sum(pairs)) / len(windows)


def _starts(row: Int[np.ndarray, " T"], window: int) -> Int[np.ndarray, " T"]:
    """Returns the index of the first token that each token sees. Each padding token is a separate segment."""
    begins = np.ones(len(row), bool)
    begins[1:] = (row[1:] != row[:-1]) | (row[1:] == 0)
    index = np.arange(len(row))
    starts = np.maximum.accumulate(np.where(begins, index, 0))
    return np.maximum(starts, index - window + 1) if window else starts
