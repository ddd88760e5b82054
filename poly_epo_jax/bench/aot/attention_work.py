"""What attention kernels compute, by arithmetic from their input rows, because no program's text says it."""

import numpy as np
from jaxtyping import Int

from poly_epo_jax.model.attention import splash, triton
from poly_epo_jax.model.config import ModelConfig

PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3, "forward_kernel": 2, "key_kernel": 4, "query_kernel": 3}
"""Matrix products over the head dimension for each pair of tokens, by what a kernel's name contains. The backward pass
takes five; if two kernels share it, both recompute the scores and their gradients."""

BLOCKS = {
    "splash": (splash.BLOCK, splash.BLOCK),
    "packed_attention_forward": (triton.FORWARD[2].own, triton.FORWARD[2].step),
    "packed_attention": (triton.BACKWARD[2].own, triton.BACKWARD[2].step),
}
"""Queries and keys of a block, in bfloat16, by what a kernel's name begins with. Kernels visit whole blocks."""


def kernel_flops(config: ModelConfig, segment_ids: Int[np.ndarray, "R T"], heads: int, kernel: str) -> float:
    """FLOPs of one run of a kernel on these rows with `heads` query heads; 0 if it is not an attention kernel."""
    products = next((count for name, count in PRODUCTS.items() if name in kernel), 0)
    return 2.0 * products * config.head_dim * heads * kernel_pairs(segment_ids, kernel)


def kernel_pairs(segment_ids: Int[np.ndarray, "R T"], kernel: str) -> int:
    """Pairs of a query and a key in all blocks that a kernel visits; 0 if it is not an attention kernel."""
    block = next((block for name, block in BLOCKS.items() if kernel.startswith(name)), None)
    return visited_pairs(segment_ids, *block) if block else 0


def visited_pairs(segment_ids: Int[np.ndarray, "R T"], query_block: int, key_block: int) -> int:
    """Pairs of a query and a key in all blocks that contain a pair of one segment whose key is not after its query."""
    visited = 0
    for row in segment_ids:
        starts = _starts(row)
        for begin in range(0, len(row), query_block):
            end = min(begin + query_block, len(row))
            # The first query's segment starts first.
            blocks = -(-end // key_block) - starts[begin] // key_block
            visited += query_block * key_block * int(blocks)
    return visited


def own_pairs(segment_ids: Int[np.ndarray, "R T"]) -> int:
    """Pairs of a query and a key of one segment whose key is not after its query; padding attends to itself."""
    return sum(int((np.arange(len(row)) - _starts(row) + 1).sum()) for row in segment_ids)


def _starts(row: Int[np.ndarray, " T"]) -> Int[np.ndarray, " T"]:
    """For each token, the first token of its segment; for padding, the token itself."""
    begins = np.ones(len(row), bool)
    begins[1:] = (row[1:] != row[:-1]) | (row[1:] == 0)
    return np.maximum.accumulate(np.where(begins, np.arange(len(row)), 0))
