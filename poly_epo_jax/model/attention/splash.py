"""JAX's splash attention for TPUs, restricted in both passes to the blocks that packed sequences need.

With its own causal mask, splash attention visits the triangle of the complete row and only masks other segments. This
is seven times as much work for sequences of 1,700 tokens on average in rows of 16,384. However, the kernels read arrays
that contain the block of each grid step and whether to process it. This module computes these arrays from the segments
at run time.
"""

import inspect

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Float

from poly_epo_jax.model.attention.segments import Segments, pad_to_blocks
from poly_epo_jax.parallel.sharding import platform

# Tokens per block. At the lengths in the module docstring, the visited area is 1.67 times the area of the segments'
# triangles with blocks of 512, and 1.33 times with blocks of 256. However, blocks of 256 take 3.7 times as many steps,
# and the overhead of a step is a few tenths of a microsecond, about the compute time of a block of 512. These are
# estimates, not measurements.
BLOCK = 512
LANES = 128  # Blocks are multiples of this number of tokens.
# The kernel's arrays of grid steps are stored in 1 MB of scalar memory, where each grid row of up to LANES steps takes
# two lines of 512 bytes.
MAX_GRID_ROWS = 1023


def splash_attention(
    q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], segments: Segments
) -> Float[Array, "B T H D"]:
    """Implements `packed_attention` on TPUs. On CPUs, the kernel is interpreted, which is slow.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      segments: Visible tokens of each token. Shared prompts are not supported.

    Returns:
      The outputs of all query heads.

    Raises:
      ImportError: If the internal interface of JAX's kernel is not the expected one.
    """
    length, heads, width = q.shape[1:]
    block = min(BLOCK, length + -length % LANES)
    # Without this constraint, XLA computes the norms and rotations of heads in the layout of the kernel, in which the
    # halves of a head share a tile, and transposes float32 arrays.
    q, k, v = with_layout_constraint(pad_to_blocks(block, q * width**-0.5, k, v), Layout((0, 2, 3, 1)))
    segments = segments.padded(block)
    groups = _groups(len(q), steps(segments, block), q.shape[1] // block)

    def one_group(infos, q, k, v, first):
        out = _kernel(infos, block)(*(x.swapaxes(0, 1) for x in (q, k, v)), splash.SegmentIds(first, first))
        return out.swapaxes(0, 1)  # pyright: ignore[reportAttributeAccessIssue]

    # The rows of a group are concatenated, because blocks of other rows are never visited. The group axis is kept even
    # if its size is 1. Without it, XLA would transpose all 128 copies of the kernel's log-normalizers before selecting
    # one.
    joined = (x.reshape(groups, -1, *x.shape[2:]) for x in (q, k, v, segments.first))
    out = jax.vmap(one_group)(mask_infos(segments, block, groups), *joined)
    return out.reshape(-1, q.shape[1], heads, width)[:, :length].astype(q.dtype)


def _groups(rows: int, num_steps: int, blocks: int) -> int:
    """Returns the minimum number of groups of rows such that the arrays of a group fit in scalar memory."""
    lines = blocks * -(-num_steps // LANES)
    return next(n for n in range(1, rows + 1) if rows % n == 0 and (rows // n * lines <= MAX_GRID_ROWS or n == rows))


def _kernel(infos: tuple[MaskInfo, MaskInfo], block: int) -> splash.SplashAttentionKernel:
    return splash.SplashAttentionKernel(
        infos[0],
        *infos,
        **_known_options(
            block_sizes=splash.BlockSizes(*[block] * 8),  # pyright: ignore[reportArgumentType]
            is_mqa=False,
            save_residuals=False,
            mask_value=splash.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=None,
            residual_checkpoint_name="attention",
            mask_function=_causal,
            interpret=platform() == "cpu",
        ),
    )


def _known_options(**options):
    """Returns the options if JAX's kernel accepts them and requires no others. Raises ImportError otherwise."""
    parameters = inspect.signature(getattr(splash, "_splash_attention", lambda: None)).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty and p.kind is p.KEYWORD_ONLY}
    if not needed <= options.keys() <= {p.name for p in parameters} or MaskInfo._fields[:5] != FIELDS:
        raise ImportError(
            f"The splash attention interface of jax {jax.__version__} is not supported; set model.attention=blockwise, "
            "or install the version in launch/lock.txt."
        )
    return options


FIELDS = ("data_next", "mask_next", "block_mask", "partial_mask_blocks", "q_sequence")


def _causal(queries: jax.Array, keys: jax.Array) -> jax.Array:
    return queries >= keys


def steps(segments: Segments, block: int) -> int:
    """Returns the maximum number of key blocks that a query block sees.

    Args:
      segments: Segments of rows that are padded to a multiple of `block`.
      block: Number of tokens per block.

    Returns:
      The number of blocks. It is the number of blocks per row if the segment length is not limited.
    """
    blocks = segments.first.shape[1] // block
    return min(blocks, -(-(segments.max_segment_tokens - 1) // block) + 1) if segments.max_segment_tokens else blocks


def mask_infos(segments: Segments, block: int, groups: int) -> tuple[MaskInfo, MaskInfo]:
    """Computes the blocks that the kernels visit.

    Grid lines are right-aligned: the last step of a line is its last block. Unused steps at the start of a line refer
    to its first block. The first block is therefore fetched while the previous line is processed, and blocks outside
    the line are not fetched.

    Args:
      segments: Segments of rows that are padded to a multiple of `block`.
      block: Number of tokens per block.
      groups: Number of groups of rows. The rows of a group are concatenated.

    Returns:
      A tuple of the mask info of the kernels that iterate over query blocks, and of the kernel that iterates over key
      blocks. Their arrays have a leading axis of size `groups`.
    """
    rows, length = segments.first.shape
    blocks, num_steps = length // block, steps(segments, block)
    own = jnp.arange(blocks, dtype=jnp.int32)[None]
    first = jnp.maximum(segments.first_key_blocks(block, block), own - (num_steps - 1))
    last = jnp.minimum(segments.last_query_blocks(block, block), own + (num_steps - 1))
    row = blocks * (jnp.arange(rows, dtype=jnp.int32) % (rows // groups))[:, None]
    own, first, last = ((x + row).reshape(groups, -1) for x in (own, first, last))
    step = jnp.arange(num_steps, dtype=jnp.int32) - (num_steps - 1)
    tokens = rows // groups * length
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[None], (groups, tokens))

    def info(at, begin):
        nearest, is_visited = jnp.maximum(at, begin), (at >= begin).astype(jnp.int32)
        # The axis of size 1 is the head axis: all heads share the blocks.
        return MaskInfo(nearest[:, None], None, is_visited[:, None], None, positions)  # pyright: ignore[reportArgumentType]

    keys = info(own[:, :, None] + step[None, None], first[:, :, None])  # [groups, 1, blocks of queries, steps]
    queries = info(last[:, None] + step[None, :, None], own[:, None])  # [groups, 1, steps, blocks of keys]
    return keys, queries
