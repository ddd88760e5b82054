"""Causal attention within packed segments, behind one function: a kernel for GPUs, one for TPUs, and a plain form."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from poly_epo_jax.model.attention.blockwise import blockwise_attention
from poly_epo_jax.model.attention.segments import Segments, make_segments
from poly_epo_jax.parallel.sharding import ROWS, platform


# Kernels are imported only where they run, as Pallas takes time to import.
def _triton(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments) -> jax.Array:
    from poly_epo_jax.model.attention.triton import triton_attention

    return triton_attention(q, k, v, segments)


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments) -> jax.Array:
    from poly_epo_jax.model.attention.splash import splash_attention

    return splash_attention(q, k, v, segments)


IMPLEMENTATIONS = {"blockwise": blockwise_attention, "triton": _triton, "splash": _splash}
"""(q, k, v, segments) -> the attention's result. All give the name "attention" to their result and to whatever else the
backward pass needs, so that remat can keep them."""

SHARES_PROMPTS = ("blockwise",)
"""The implementations that read `Segments.prompt`. The others need rows in which each sequence has its own prompt."""

KERNELS = {"cpu": "blockwise", "gpu": "triton", "tpu": "splash"}
"""The fastest form on each platform; there is no kernel for other platforms."""

distrusted: set[str] = set()
"""Kernels that have failed the self-check on this process's devices; "auto" does not use them."""


def packed_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    segment_ids: Int[Array, "B T"],
    implementation: str = "auto",
    longest: int = 0,
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H D"]:
    """softmax(q k' / sqrt(D)) v over the earlier tokens of the same segment, K key heads shared by H query heads.

    A segment is a run of equal ids; several sequences lie in one row. A token of padding (id 0) sees itself only.

    Args:
      implementation: a key of IMPLEMENTATIONS, or "auto": the platform's own.
      longest: no segment may have more tokens; the caller must ensure this. 0: none is longer than its row.
      positions: of the tokens in their sequences. With one of SHARES_PROMPTS, a segment that begins at a position above
        0 sees the segment that it continues, see `make_segments`.
    """
    attend, segments = IMPLEMENTATIONS[fastest(implementation)], make_segments(segment_ids, longest, positions)
    if not jax.sharding.get_abstract_mesh().empty:
        # The compiler cannot split a kernel or its loops, so each device runs them on its own rows and heads.
        heads, rows = PartitionSpec(ROWS, None, "tensor", None), PartitionSpec(ROWS, None)
        attend = jax.shard_map(attend, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False)
    return attend(q, k, v, segments)


def cached_attention(
    q: Float[Array, "B H D"],
    k: Float[Array, "B K D S"],
    v: Float[Array, "B K S D"],
    visible: Bool[Array, "B S"],
) -> Float[Array, "B H D"]:
    """Attention of one new token per row over the `visible` ones of S cached tokens.

    Keys and values are laid out as the two matmuls read them. The softmax is computed in float32.
    """
    rows, kv_heads, head_dim, _ = k.shape
    grouped = q.reshape(rows, kv_heads, -1, head_dim) * head_dim**-0.5
    scores = jnp.einsum("bkgd,bkds->bkgs", grouped, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("bkgs,bksd->bkgd", weights, v).reshape(q.shape)


def fastest(implementation: str) -> str:
    """The implementation itself or, for "auto", that of the platform being traced for, unless it is distrusted."""
    if implementation != "auto":
        return implementation
    kernel = KERNELS.get(platform(), "blockwise")
    return "blockwise" if kernel in distrusted else kernel
