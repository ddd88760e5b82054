"""Causal attention within packed segments, behind one function: XLA anywhere, tokamax on GPU, splash on TPU."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from poly_epo_jax.model.sharding import ROWS

KERNEL_BLOCK = 512  # the GPU and TPU kernels work on whole blocks of this many tokens


def packed_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    segment_ids: Int[Array, "B T"],
    implementation: str = "auto",
) -> Float[Array, "B T H D"]:
    """softmax(q k' / sqrt(D)) v over the earlier tokens of the same segment, K key heads shared by H query heads.

    A segment is a run of equal ids; several sequences lie in one row. Padding (id 0) attends to padding only.
    `implementation` is a key of IMPLEMENTATIONS, or "auto": the backend's own.
    """
    if implementation == "auto":
        implementation = {"gpu": "tokamax", "tpu": "splash"}.get(jax.default_backend(), "xla")
    attend = IMPLEMENTATIONS[implementation]
    if implementation == "xla" or jax.sharding.get_abstract_mesh().empty:
        return attend(q, k, v, segment_ids)
    # The compiler cannot split a kernel, so each device runs it on its own rows and heads.
    heads, rows = PartitionSpec(ROWS, None, "tensor", None), PartitionSpec(ROWS, None)
    return jax.shard_map(attend, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False)(
        q, k, v, segment_ids
    )


def cached_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T H D"]:
    """Attention of T new tokens over a cache of S slots, those of them that `mask` shows."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])


def _xla(q, k, v, segment_ids):
    causal = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
    return cached_attention(q, k, v, causal[None] & same_segment)


def _tokamax(q, k, v, segment_ids):
    # The packed causal mask exists only in tokamax's private mask type: a key is visible from its segment's start on.
    from tokamax._src.ops.attention import api, base  # pyright: ignore[reportMissingImports]

    index = jnp.arange(q.shape[1])
    starts = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = jnp.concatenate([jnp.ones_like(starts[:, :1]), starts], axis=1)
    segment_start = jax.lax.cummax(jnp.where(starts, index[None], 0), axis=1)
    mask = base.Mask(k_start=segment_start[:, None, :], is_causal=True)
    kernel = "mosaic_gpu" if jax.default_backend() == "gpu" else "xla"
    return api.IMPLEMENTATIONS[kernel](q, k, v, mask=mask)


def _splash(q, k, v, segment_ids):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, num_heads = q.shape[1:3]
    block = min(KERNEL_BLOCK, length)
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * num_heads),
        block_sizes=splash.BlockSizes(*[block] * 8),  # pyright: ignore[reportArgumentType]
        interpret=jax.default_backend() == "cpu",
    )
    heads_first = (x.swapaxes(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    rows = (*heads_first, splash.SegmentIds(segment_ids, segment_ids))
    out = jax.vmap(kernel)(*rows)
    return out.swapaxes(1, 2).astype(q.dtype)  # pyright: ignore[reportAttributeAccessIssue]


IMPLEMENTATIONS = {"xla": _xla, "tokamax": _tokamax, "splash": _splash}
