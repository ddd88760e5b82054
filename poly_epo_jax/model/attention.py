"""Causal attention within packed segments, behind one function: a kernel for GPUs, one for TPUs, else a plain form."""

import functools
import importlib.util
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from poly_epo_jax.model.blockwise import blockwise_attention, segment_starts
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
        implementation = _fastest()
    attend = IMPLEMENTATIONS[implementation]
    if not jax.sharding.get_abstract_mesh().empty:
        # The compiler cannot split a kernel or its loops, so each device runs them on its own rows and heads.
        heads, rows = PartitionSpec(ROWS, None, "tensor", None), PartitionSpec(ROWS, None)
        attend = jax.shard_map(attend, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False)
    return attend(q, k, v, segment_ids)


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


@functools.cache
def _fastest() -> str:
    """The backend's kernel; where there is none, the plain form, with one warning."""
    backend = jax.default_backend()
    if backend == "gpu" and importlib.util.find_spec("tokamax"):
        return "tokamax"
    if backend == "tpu":
        return "splash"
    if backend != "cpu":
        warnings.warn(
            f"There is no fast attention kernel for {backend} here, so the plain form runs, which is much slower; on "
            "GPUs, install this package's extra 'gpu'.",
            stacklevel=2,
        )
    return "blockwise"


def _tokamax(q, k, v, segment_ids):
    # Only tokamax's private mask type can say that a key is visible from its segment's start on.
    from tokamax._src.ops.attention import api, base  # pyright: ignore[reportMissingImports]

    length, (q, k, v, segment_ids) = q.shape[1], _whole_blocks(q, k, v, segment_ids)
    mask = base.Mask(k_start=segment_starts(segment_ids)[:, None, :], is_causal=True)
    return api.IMPLEMENTATIONS[_tokamax_kernel()](q, k, v, mask=mask)[:, :length]


def _tokamax_kernel() -> str:
    """Hopper and later GPUs have their own kernel."""
    if jax.default_backend() == "cpu":
        return "xla"
    return "mosaic_gpu" if float(jax.devices()[0].compute_capability) >= 9 else "triton"


def _splash(q, k, v, segment_ids):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, (q, k, v, segment_ids) = q.shape[1], _whole_blocks(q, k, v, segment_ids)
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([masks.CausalMask((q.shape[1], q.shape[1]))] * q.shape[2]),
        block_sizes=splash.BlockSizes(*[KERNEL_BLOCK] * 8),  # pyright: ignore[reportArgumentType]
        interpret=jax.default_backend() == "cpu",
    )
    heads_first = (x.swapaxes(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    rows = (*heads_first, splash.SegmentIds(segment_ids, segment_ids))
    out = jax.vmap(kernel)(*rows)
    return out.swapaxes(1, 2)[:, :length].astype(q.dtype)  # pyright: ignore[reportAttributeAccessIssue]


def _whole_blocks(*arrays):
    """Arrays [B, T, ...] with T padded with zeros to a multiple of KERNEL_BLOCK."""
    padding = -arrays[0].shape[1] % KERNEL_BLOCK
    return [jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) for x in arrays]


IMPLEMENTATIONS = {"blockwise": blockwise_attention, "tokamax": _tokamax, "splash": _splash}
