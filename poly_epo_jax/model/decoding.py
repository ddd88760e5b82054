"""The network of qwen3.py one token at a time, laid out for matmuls with few columns.

Decoding reads every weight once for a handful of tokens. The matmul W x, of a weight [out, in] and tokens as columns,
then takes at most half the time of the training path's x W. So activations are [features, tokens] here, and each layer
has its own arrays, because a slice of a stack would be copied before every matmul.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from poly_epo_jax.model.attention import cached_attention, packed_attention
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.lora import is_adapter, merged
from poly_epo_jax.model.qwen3 import rms_norm
from poly_epo_jax.parallel.sharding import ROWS, pinned
from poly_epo_jax.types import Params


class KVCache(NamedTuple):
    """Each layer's keys [rows, kv_heads, head_dim, length] and values [rows, kv_heads, length, head_dim].

    A token's index is its position. In this layout both matmuls of the attention read contiguous rows.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    @property
    def length(self) -> int:
        return self.v[0].shape[2]

    def resized(self, length: int) -> "KVCache":
        """The cache cut off, or padded with zeros, to this length."""

        def along(axis: int, x: jax.Array) -> jax.Array:
            x = jax.lax.slice_in_dim(x, 0, min(length, x.shape[axis]), axis=axis)
            return jnp.pad(x, [(0, length - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])

        return KVCache(tuple(along(3, x) for x in self.k), tuple(along(2, x) for x in self.v))

    def with_rows(self, rows: Int[Array, " R"], other: "KVCache", other_rows: Int[Array, " R"]) -> "KVCache":
        """The cache with `rows` taken from another, up to the shorter length; a row out of bounds is skipped."""
        length = min(self.length, other.length)
        other = other.resized(length)
        k = (x.at[rows, :, :, :length].set(y[other_rows], mode="drop") for x, y in zip(self.k, other.k, strict=True))
        v = (x.at[rows, :, :length].set(y[other_rows], mode="drop") for x, y in zip(self.v, other.v, strict=True))
        return KVCache(tuple(k), tuple(v))


def init_cache(config: ModelConfig, rows: int, length: int) -> KVCache:
    heads, head_dim, layers = config.num_kv_heads, config.head_dim, range(config.num_layers)
    return KVCache(
        tuple(jnp.zeros((rows, heads, head_dim, length), config.dtype) for _ in layers),
        tuple(jnp.zeros((rows, heads, length, head_dim), config.dtype) for _ in layers),
    )


def decoding_weights(config: ModelConfig, params: Params) -> Params:
    """The weights in the compute type, each layer's matrices as [out, in], split like the trainer's own.

    An adapter is merged into them.
    """

    def of_layer(name: str, weight: jax.Array) -> jax.Array:
        weight = weight.astype(config.dtype)
        if name in ("q", "k", "v"):
            weight = weight.reshape(config.hidden_size, -1).T
        elif name in ("o", "gate", "up", "down"):
            weight = weight.reshape(-1, weight.shape[-1]).T
        return _pinned(name, weight, "fsdp")

    stacks, embed = params["layers"], params["embed"].astype(config.dtype)
    ends = {"head": embed} if config.tied_head else {"head": params["untied_head"].astype(config.dtype), "embed": embed}
    return {
        **ends,
        "norm": params["norm"].astype(config.dtype),
        "layers": [
            {name: of_layer(name, merged(config, stacks, name, i)) for name in stacks if not is_adapter(name)}
            for i in range(config.num_layers)
        ],
    }


def whole_weights(weights: Params) -> Params:
    """`decoding_weights` gathered from their fsdp shards: a whole copy on every device, except for what tensor splits.

    Decoding reads every weight once per token. If weights were gathered for each token, they would cross the links
    between devices, which are an order of magnitude slower than memory; if `decode` gathered them, they would cross
    once in at most MAX_STEPS tokens. This copy is made once for all generations of a call: it costs one gather, and its
    memory is free again while the policy is trained.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return weights if mesh.empty or mesh.shape["fsdp"] == 1 else _gather(weights)


@jax.jit
def _gather(weights: Params) -> Params:
    return jax.tree.map_with_path(lambda path, x: _pinned(path[-1].key, x, None), weights)


def _pinned(name: str, weight: jax.Array, fsdp: str | None) -> jax.Array:
    """Pins a weight's layout: heads, MLP and vocabulary are split over tensor, the residual stream over `fsdp`."""
    if weight.ndim == 1:
        return weight
    if name.endswith("_bias"):
        return pinned(weight, "tensor")
    return pinned(weight, *((fsdp, "tensor") if name in ("o", "down") else ("tensor", fsdp)))


def prefill(config: ModelConfig, weights: Params, tokens: Int[Array, "Q L"], valid: Bool[Array, "Q L"]) -> KVCache:
    """The cache, of length L, of prompts that are padded on the right."""
    rows, length = tokens.shape
    keys, values = [], []

    def attend(q, k, v, layer):
        q, k, v = (x.reshape(rows, length, *x.shape[1:]) for x in (q, k, v))
        keys.append(k.transpose(0, 2, 3, 1))
        values.append(v.transpose(0, 2, 1, 3))
        out = packed_attention(q, k, v, valid.astype(jnp.int32), config.attention)
        return out.reshape(rows * length, *q.shape[2:])

    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    _run(config, weights, tokens.reshape(-1), positions.reshape(-1), attend)
    return KVCache(tuple(keys), tuple(values))


def decode(
    config: ModelConfig, weights: Params, tokens: Int[Array, " B"], positions: Int[Array, " B"], cache: KVCache
) -> tuple[Float[Array, "V B"], KVCache]:
    """Appends one token per row to the cache; returns the logits of the next token, and the cache."""
    rows = jnp.arange(len(tokens))
    visible = jnp.arange(cache.length)[None] <= positions[:, None]
    keys, values = list(cache.k), list(cache.v)

    def attend(q, k, v, layer):
        keys[layer] = keys[layer].at[rows, :, :, positions].set(k)
        values[layer] = values[layer].at[rows, :, positions].set(v)
        return cached_attention(q, keys[layer], values[layer], visible)

    x = _run(config, weights, tokens, positions, attend)
    logits = jnp.matmul(weights["head"], x, preferred_element_type=jnp.float32)
    return logits, KVCache(tuple(keys), tuple(values))


def _run(
    config: ModelConfig,
    weights: Params,
    tokens: Int[Array, " M"],
    positions: Int[Array, " M"],
    attend: Callable[[jax.Array, jax.Array, jax.Array, int], jax.Array],
) -> Float[Array, "D M"]:
    """Final hidden states; `attend(q, k, v, layer)` takes and returns arrays [M, heads, head_dim]."""

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x.T, weight, config.norm_eps).T

    # Rotary angles, once for all layers; without the barrier the compiler computes their cosines and sines in each.
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None, None].astype(jnp.float32) * frequencies[None, None]
    cos, sin = jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))

    def rotate(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

    def heads(w: Any, name: str, h: jax.Array) -> jax.Array:
        # Without the barrier the compiler transposes the matmul into the slow one that this layout avoids.
        y = jax.lax.optimization_barrier(w[name] @ h).T.reshape(len(tokens), -1, config.head_dim)
        y = y + w[f"{name}_bias"][None] if config.attention_bias else y
        return rms_norm(y, w[f"{name}_norm"], config.norm_eps) if config.qk_norm and name != "v" else y

    x = pinned(weights["head" if config.tied_head else "embed"][tokens].T, None, ROWS)
    for layer, w in enumerate(weights["layers"]):
        h = norm(x, w["attention_norm"])
        attended = attend(rotate(heads(w, "q", h)), rotate(heads(w, "k", h)), heads(w, "v", h), layer)
        x = pinned(x + w["o"] @ attended.reshape(len(tokens), -1).T, None, ROWS)
        h = norm(x, w["mlp_norm"])
        x = pinned(x + w["down"] @ (jax.nn.silu(w["gate"] @ h) * (w["up"] @ h)), None, ROWS)
    return norm(x, weights["norm"])
