"""JAX's splash attention for TPUs, made to visit only the blocks of packed sequences' own triangles, in both passes.

Its causal mask visits a row's whole triangle, and segment ids only mask within it: seven times the work at a mean of
1,700 tokens in rows of 16,384. But arrays tell the kernels which block comes at each step of their grid and whether to
work on it, and these arrays may be computed from the segments while the program runs.
"""

import inspect

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Float

from poly_epo_jax.model.attention.segments import Segments, whole_blocks
from poly_epo_jax.parallel.sharding import platform

# Tokens per block. At the lengths above, blocks of 512 have 1.67 times the area of the segments' own triangles, and
# blocks of 256 only 1.33 times; but blocks of 256 take 3.7 times as many steps, and a step costs some tenths of a
# microsecond, about as much as a block of 512 takes to compute. Neither has been measured.
BLOCK = 512
LANES = 128  # blocks are whole multiples of it
# The arrays lie in a megabyte of scalar memory, in which each of these grid rows takes two lines of 512 bytes.
MAX_GRID_ROWS = 1023


def splash_attention(
    q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], segments: Segments
) -> Float[Array, "B T H D"]:
    """Like `packed_attention`; on a CPU it is interpreted, which is slow.

    Raises:
      ImportError: JAX's kernel, whose internal interface this uses, is not the one known here.
    """
    length, heads, width = q.shape[1:]
    block = min(BLOCK, length + -length % LANES)
    q, k, v = whole_blocks(block, q * width**-0.5, k, v)
    segments = segments.lengthened(block)
    groups = _groups(len(q), steps(segments, block), q.shape[1] // block)

    def one_group(infos, q, k, v, first):
        out = _kernel(infos, block)(*(x.swapaxes(0, 1) for x in (q, k, v)), splash.SegmentIds(first, first))
        return out.swapaxes(0, 1)  # pyright: ignore[reportAttributeAccessIssue]

    # Rows are laid end to end, as blocks of other rows are never visited. The axis of groups is kept even if it is 1:
    # without it XLA transposes the kernel's log-normalizers, 128 copies of each, before it takes one of them.
    joined = (x.reshape(groups, -1, *x.shape[2:]) for x in (q, k, v, segments.first))
    out = jax.vmap(one_group)(mask_infos(segments, block, groups), *joined)
    return out.reshape(-1, q.shape[1], heads, width)[:, :length].astype(q.dtype)


def _groups(rows: int, num_steps: int, blocks: int) -> int:
    """How many kernels process the rows, one after another: as few as the scalar memory allows."""
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
    """The options, if JAX's kernel takes them and needs no others."""
    parameters = inspect.signature(getattr(splash, "_splash_attention", lambda: None)).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty and p.kind is p.KEYWORD_ONLY}
    if not needed <= options.keys() <= {p.name for p in parameters} or MaskInfo._fields[:5] != FIELDS:
        raise ImportError(
            f"The splash attention of jax {jax.__version__} is not the one that poly_epo_jax knows how to bound; set "
            "model.attention=blockwise, or install the version of launch/lock.txt."
        )
    return options


FIELDS = ("data_next", "mask_next", "block_mask", "partial_mask_blocks", "q_sequence")


def _causal(queries: jax.Array, keys: jax.Array) -> jax.Array:
    return queries >= keys


def steps(segments: Segments, block: int) -> int:
    """The most blocks of keys that any block of queries sees; those of a whole row if nothing bounds its segments."""
    blocks = segments.first.shape[1] // block
    return min(blocks, -(-(segments.longest - 1) // block) + 1) if segments.longest else blocks


def mask_infos(segments: Segments, block: int, groups: int) -> tuple[MaskInfo, MaskInfo]:
    """What the kernels of queries, and the kernel of keys, visit: [groups, ...], each of rows laid end to end.

    A line of the grid is filled from its end: its last step is its last block. The steps before its first block already
    hold that block, so it is fetched while the previous line ends, and nothing else is fetched.
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
        # All heads share it, as the axis of 1 says.
        infos = nearest[:, None], None, is_visited[:, None], None, positions
        return MaskInfo(*infos)  # pyright: ignore[reportArgumentType]

    keys = info(own[:, :, None] + step[None, None], first[:, :, None])  # [groups, 1, blocks of queries, steps]
    queries = info(last[:, None] + step[None, :, None], own[:, None])  # [groups, 1, steps, blocks of keys]
    return keys, queries
