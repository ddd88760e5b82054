"""Causal attention within packed segments, with a kernel for GPUs, a kernel for TPUs and a blockwise implementation in
JAX.

`packed_attention` selects the implementation. `cached_attention` is used for decoding.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from poly_epo_jax.model.attention.blockwise import blockwise_attention
from poly_epo_jax.model.attention.segments import Segments, make_segments
from poly_epo_jax.parallel.sharding import ROWS, on_each_device, platform


# Kernels are imported when they are first used, because importing Pallas takes time.
def _triton(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments) -> jax.Array:
    from poly_epo_jax.model.attention.triton import triton_attention

    return triton_attention(q, k, v, segments)


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments) -> jax.Array:
    from poly_epo_jax.model.attention.splash import splash_attention

    return splash_attention(q, k, v, segments)


IMPLEMENTATIONS = {"blockwise": blockwise_attention, "triton": _triton, "splash": _splash}
"""Functions `(q, k, v, segments) -> out`. They name their result and the other arrays that the backward pass needs
"attention" (`checkpoint_name`), so that remat policies can keep these arrays."""

SUPPORTS_SHARED_PROMPTS = ("blockwise",)
"""Implementations that support shared prompts. The others require rows in which each sequence contains its prompt."""

SUPPORTS_WINDOWS = ("blockwise", "triton")
"""Implementations that support windows, because they read `Segments.first` of every query."""

DEFAULT_IMPLEMENTATIONS = {"cpu": "blockwise", "gpu": "triton", "tpu": "splash"}
"""Fastest implementation on each platform. Other platforms use `blockwise`."""

disabled_kernels: set[str] = set()
"""Kernels that failed the self-check in this process. They are not selected by "auto"."""


def packed_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    segment_ids: Int[Array, "B T"],
    implementation: str = "auto",
    max_segment_tokens: int = 0,
    positions: Int[Array, "B T"] | None = None,
    window: int | Int[Array, ""] = 0,
) -> Float[Array, "B T H D"]:
    """Computes softmax(q k' / sqrt(D)) v over the visible tokens of packed rows.

    A row contains several segments (runs of equal ids). A token sees itself and the earlier tokens of its segment.
    Padding tokens see only themselves. H query heads share K key heads.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      segment_ids: Segment of each token. 0 marks padding.
      implementation: Key of IMPLEMENTATIONS. "auto" selects the fastest one for the platform.
      max_segment_tokens: Maximum number of tokens of a segment, which the caller guarantees. 0 means that only the row
        length limits segments.
      positions: Position of each token in its sequence. With an implementation in SUPPORTS_SHARED_PROMPTS, a
        segment that starts at a position above 0 also sees the prompt that it continues, see `make_segments`. If None,
        prompts are not shared.
      window: Number of tokens that a token sees, including itself. It may be traced. 0 disables the window.

    Returns:
      The outputs of all query heads.
    """
    has_window = not isinstance(window, int) or window > 0
    attend = IMPLEMENTATIONS[resolve_implementation(implementation, has_window)]
    segments = make_segments(segment_ids, max_segment_tokens, positions)
    segments = segments.within(window, positions) if has_window else segments
    # The compiler cannot shard a kernel or its loops. Each device runs them on its local rows and heads.
    heads, rows = PartitionSpec(ROWS, None, "tensor", None), PartitionSpec(ROWS, None)
    return on_each_device(attend, (heads, heads, heads, rows), heads)(q, k, v, segments)


def cached_attention(
    q: Float[Array, "B H D"],
    k: Float[Array, "B K D S"],
    v: Float[Array, "B K S D"],
    visible: Bool[Array, "B S"],
) -> Float[Array, "B H D"]:
    """Computes the attention of one new token per row over S cached tokens, with the softmax in float32.

    Args:
      q: Queries of the new tokens.
      k: Cached keys, in the layout of KVCache.
      v: Cached values, in the layout of KVCache.
      visible: Mask of the visible tokens. At least one token of each row must be visible.

    Returns:
      The outputs of all query heads.
    """
    rows, kv_heads, head_dim, _ = k.shape
    grouped = q.reshape(rows, kv_heads, -1, head_dim) * head_dim**-0.5
    scores = jnp.einsum("bkgd,bkds->bkgs", grouped, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("bkgs,bksd->bkgd", weights, v).reshape(q.shape)


def resolve_implementation(implementation: str, has_window: bool = False) -> str:
    """Returns the implementation that a value of `model.attention` selects.

    Args:
      implementation: Key of IMPLEMENTATIONS, or "auto", which selects the kernel of the platform that is being traced
        for, unless this kernel failed the self-check or does not support windows.
      has_window: Whether the attention has a window.

    Returns:
      A key of IMPLEMENTATIONS.
    """
    if implementation != "auto":
        return implementation
    kernel = DEFAULT_IMPLEMENTATIONS.get(platform(), "blockwise")
    is_usable = kernel not in disabled_kernels and (kernel in SUPPORTS_WINDOWS or not has_window)
    return kernel if is_usable else "blockwise"
