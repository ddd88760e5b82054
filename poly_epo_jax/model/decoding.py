"""Prefill and single-token decoding with the network of transformer.py.

Decoding reads every weight once for a small number of tokens. Each layer has separate arrays in the compute type,
because a slice of a stacked array would be copied before every matmul. `run_layer` computes the layers, as in training.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from poly_epo_jax.model.attention import cached_attention, packed_attention
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.experts import Routing, apply_experts, without_experts
from poly_epo_jax.model.layer import ACTIVATIONS, embed, layer_kinds, make_rotations, normalize, run_layer
from poly_epo_jax.model.linear_attention import (
    LinearInputs,
    LinearState,
    decode_linear_attention,
    init_linear_state,
    prefill_linear_attention,
)
from poly_epo_jax.model.lora import is_adapter, merge_adapter
from poly_epo_jax.parallel.sharding import ROWS, constrain_sharding
from poly_epo_jax.types import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers. The index of a token in the cache is its position in the sequence.

    A layer whose window is shorter than `length` stores only the last `window` tokens, and the index of a token is its
    position modulo the window. With these layouts, both matmuls of the attention read contiguous rows.

    Attributes:
      k: Keys of each layer, [rows, kv_heads, head_dim, length or window].
      v: Values of each layer, [rows, kv_heads, length or window, head_dim].
      length: Maximum number of tokens of a sequence.
      windows: Window of each layer in tokens, 0 without a window.
      linear: States of the layers with linear attention, which are not among the layers of the other fields.
    """

    k: tuple[Any, ...]  # Arrays, or leaves that JAX substitutes for them.
    v: tuple[Any, ...]
    linear: tuple[LinearState, ...] = ()
    length: int = dataclasses.field(default=0, metadata={"static": True})
    windows: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    def resized(self, length: int) -> "KVCache":
        """Returns the cache truncated or padded with zeros to `length` positions, which must fit all sequences."""

        def along(axis: int, x: jax.Array, window: int) -> jax.Array:
            size = _stored_tokens(length, window)
            x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
            return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])

        k = tuple(along(3, x, window) for x, window in zip(self.k, self.windows, strict=True))
        v = tuple(along(2, x, window) for x, window in zip(self.v, self.windows, strict=True))
        return dataclasses.replace(self, k=k, v=v, length=length)

    def with_rows(self, rows: Int[Array, " R"], other: "KVCache", other_rows: Int[Array, " R"]) -> "KVCache":
        """Returns the cache with some rows copied from another cache.

        Args:
          rows: Destination rows. Indices out of bounds are skipped.
          other: Cache to copy from. Positions up to the shorter of both lengths are copied.
          other_rows: Rows of `other`, one for each element of `rows`.

        Returns:
          A cache of the same shape.
        """
        other = other.resized(min(self.length, other.length))
        keys, values = zip(self.k, other.k, strict=True), zip(self.v, other.v, strict=True)
        k = (x.at[rows, :, :, : y.shape[3]].set(y[other_rows], mode="drop") for x, y in keys)
        v = (x.at[rows, :, : y.shape[2]].set(y[other_rows], mode="drop") for x, y in values)
        linear = jax.tree.map(lambda x, y: x.at[rows].set(y[other_rows], mode="drop"), self.linear, other.linear)
        return dataclasses.replace(self, k=tuple(k), v=tuple(v), linear=linear)


def init_cache(config: ModelConfig, rows: int, length: int) -> KVCache:
    """Creates a cache of zeros in the compute type.

    Args:
      config: Model configuration.
      rows: Number of sequences.
      length: Number of token positions per row.

    Returns:
      The cache.
    """
    heads, head_dim, windows = config.num_kv_heads, config.head_dim, config.attention_windows
    sizes = [_stored_tokens(length, window) for window in windows]
    return KVCache(
        tuple(jnp.zeros((rows, heads, head_dim, size), config.dtype) for size in sizes),
        tuple(jnp.zeros((rows, heads, size, head_dim), config.dtype) for size in sizes),
        tuple(init_linear_state(config, rows) for _ in config.stacks.get("linear_layers", ())),
        length,
        windows,
    )


def _stored_tokens(length: int, window: int) -> int:
    return min(length, window) if window else length


def decoding_weights(config: ModelConfig, params: Params) -> Params:
    """Converts weights to the layout of this module, sharded over the mesh like the trained weights.

    Args:
      config: Model configuration.
      params: Weights of the model. An adapter is merged into the weights that it adapts.

    Returns:
      A dict with `head`, `norm`, `layers` (a list with a dict of weights for each layer) and, unless the head is tied,
      `embed`. All weights have the compute type, and the matrices of layers are [in, out].
    """

    def of_layer(name: str, weight: jax.Array) -> jax.Array:
        weight = weight.astype(config.dtype)
        if name in ("q", "k", "v", "output_gate"):
            weight = weight.reshape(config.hidden_size, -1)
        elif name == "o":
            weight = weight.reshape(-1, config.hidden_size)
        return _constrain_weight(name, weight, "fsdp")

    embed = params["embed"].astype(config.dtype)
    ends = (
        {"head": embed}
        if config.tie_word_embeddings
        else {"head": params["untied_head"].astype(config.dtype), "embed": embed}
    )
    return {
        **ends,
        "norm": params["norm"].astype(config.dtype),
        "layers": [
            {
                name: of_layer(name, merge_adapter(config, params[stack], name, index))
                for name in params[stack]
                if not is_adapter(name)
            }
            for stack, index in config.places
        ],
    }


def gather_weights_over_fsdp(weights: Params) -> Params:
    """Gathers decoding weights over the `fsdp` mesh axis. Sharding over `tensor` is kept.

    Decoding reads every weight once per token. Gathering once per generation call avoids one gather per token, or per
    call of a compiled program that decodes several tokens, over device links that are an order of magnitude slower than
    device memory. The callers free the copy before the policy is updated.

    Args:
      weights: Weights from `decoding_weights`.

    Returns:
      The weights, replicated over `fsdp`. Returned unchanged without a mesh, or if its `fsdp` axis has size 1.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return weights if mesh.empty or mesh.shape["fsdp"] * mesh.shape["expert"] == 1 else _gather(weights)


@jax.jit
def _gather(weights: Params) -> Params:
    return jax.tree.map_with_path(lambda path, x: _constrain_weight(path[-1].key, x, None), weights)


def _constrain_weight(name: str, weight: jax.Array, fsdp: str | None) -> jax.Array:
    """Shards heads, MLP and vocabulary over `tensor`. `fsdp` is the mesh axis for the residual stream, or None."""
    if weight.ndim == 1:
        return weight
    if name in ("router", "qkv"):
        return constrain_sharding(weight, fsdp, None)
    if name == "conv":
        return constrain_sharding(weight, None, None)
    if name.endswith(("_bias", "_norm")):
        return constrain_sharding(weight, "tensor")
    experts = ["expert" if fsdp else None] * (weight.ndim - 2)
    by_rows = name in ("o", "down", "head", "embed")
    return constrain_sharding(weight, *experts, *(("tensor", fsdp) if by_rows else (fsdp, "tensor")))


class _LayerWeights:
    """Separate arrays of one layer, as `run_layer` reads them."""

    def __init__(self, config: ModelConfig, own: Params):
        self._activation = ACTIVATIONS[config.activation]
        self._own, head_dim = own, config.head_dim
        self._widths = {"q": config.query_width, "k": head_dim, "v": head_dim, "output_gate": config.linear_value_dim}

    def __contains__(self, name: str) -> bool:
        return name in self._own

    def vector(self, name: str) -> jax.Array:
        return self._own[name]

    def project(self, x: Float[Array, "M ..."], name: str) -> Float[Array, "M ..."]:
        y = x.reshape(len(x), -1) @ self._own[name]
        if name in self._widths:
            return y.reshape(len(x), -1, self._widths[name])
        return constrain_sharding(y, ROWS) if name in ("o", "down") else y

    def apply_experts(self, x: Float[Array, "M D"], routing: Routing) -> Float[Array, "M D"]:
        mlp = self._own["gate"], self._own["up"], self._own["down"]
        return constrain_sharding(apply_experts(self._activation, False, x, routing, mlp), ROWS)


def prefill(config: ModelConfig, weights: Params, tokens: Int[Array, "Q L"], valid: Bool[Array, "Q L"]) -> KVCache:
    """Computes the cache of Q prompts.

    The first call of `decode` repeats the last token of each prompt, so the states of layers with linear attention do
    not include this token.

    Args:
      config: Model configuration.
      weights: Weights from `decoding_weights`.
      tokens: Prompt tokens, padded on the right to length L.
      valid: Mask of the tokens that are not padding.

    Returns:
      A cache with Q rows of length L.
    """
    (rows, length), kinds = tokens.shape, layer_kinds(config)
    keys, values, states = [], [], []
    all_but_last = jnp.pad(valid[:, 1:], [(0, 0), (0, 1)])

    def attend(layer, q, k, v):
        q, k, v = (x.reshape(rows, length, *x.shape[1:]) for x in (q, k, v))
        kept_k, kept_v = (_last_tokens(x, valid, config.layer_windows[layer]) for x in (k, v))
        keys.append(kept_k.transpose(0, 2, 3, 1))
        values.append(kept_v.transpose(0, 2, 1, 3))
        out = packed_attention(q, k, v, valid.astype(jnp.int32), config.attention, window=kinds[layer].window)
        return out.reshape(rows * length, *q.shape[2:])

    def attend_linearly(layer, inputs):
        qkv, log_decay, beta = (x.reshape(rows, length, -1) for x in (inputs.qkv, inputs.log_decay, inputs.beta))
        inputs = LinearInputs(qkv, inputs.conv, log_decay, beta)
        out, state = prefill_linear_attention(config, inputs, all_but_last)
        states.append(state)
        return out.reshape(rows * length, *out.shape[2:])

    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    _hidden_states(
        config,
        weights,
        tokens.reshape(-1),
        positions.reshape(-1),
        valid.reshape(-1),
        {"layers": attend, "linear_layers": attend_linearly},
    )
    return KVCache(tuple(keys), tuple(values), tuple(states), length, config.attention_windows)


def _last_tokens(x: Float[Array, "Q L K D"], valid: Bool[Array, "Q L"], window: int) -> Float[Array, "Q W K D"]:
    """Selects the last `window` tokens of each prompt, at their positions modulo the window."""
    if _stored_tokens(x.shape[1], window) == x.shape[1]:
        return x
    index, last = jnp.arange(window)[None], valid.sum(axis=1, keepdims=True) - 1
    positions = jnp.where(index <= last, index + (last - index) // window * window, index)
    return jnp.take_along_axis(x, positions[:, :, None, None], axis=1)


def decode(
    config: ModelConfig,
    weights: Params,
    tokens: Int[Array, " B"],
    positions: Int[Array, " B"],
    active: Bool[Array, " B"],
    cache: KVCache,
) -> tuple[Float[Array, "V B"], KVCache]:
    """Appends one token per row to the cache and computes the logits of the next token.

    Args:
      config: Model configuration.
      weights: Weights from `decoding_weights`.
      tokens: Token of each of the B rows.
      positions: Position of each token in its sequence. Cached tokens up to this position are visible.
      active: Mask of the rows whose logits are used. The tokens of other rows do not pass through experts.
      cache: Cache with B rows.

    Returns:
      A tuple of the float32 logits [V, B] and the updated cache.
    """
    rows = jnp.arange(len(tokens))
    keys, values, states = list(cache.k), list(cache.v), list(cache.linear)

    def attend(layer, q, k, v):
        _, i = config.places[layer]
        size = keys[i].shape[3]
        index = positions % size if cache.windows[i] else positions
        keys[i] = keys[i].at[rows, :, :, index].set(k)
        values[i] = values[i].at[rows, :, index].set(v)
        # After `size` tokens, all stored tokens are in the window.
        return cached_attention(q, keys[i], values[i], jnp.arange(size)[None] <= positions[:, None])

    def attend_linearly(layer, inputs):
        _, i = config.places[layer]
        out, states[i] = decode_linear_attention(config, inputs, states[i])
        return out

    x = _hidden_states(config, weights, tokens, positions, active, {"layers": attend, "linear_layers": attend_linearly})
    logits = jnp.matmul(weights["head"], x.T, preferred_element_type=jnp.float32)
    return logits, dataclasses.replace(cache, k=tuple(keys), v=tuple(values), linear=tuple(states))


def _hidden_states(
    config: ModelConfig,
    weights: Params,
    tokens: Int[Array, " M"],
    positions: Int[Array, " M"],
    valid: Bool[Array, " M"],
    mixers: Mapping[str, Callable[..., jax.Array]],
) -> Float[Array, "M D"]:
    """Returns the final hidden states. Those of tokens that are not `valid` are undefined.

    `mixers` contains the functions `attend` of `run_layer` by stack. Their first argument is the number of the layer.
    """

    def select(routing):
        return without_experts(config, routing, ~valid)

    rotations, kinds = make_rotations(config, positions), layer_kinds(config)
    x = constrain_sharding(embed(config, weights["head" if config.tie_word_embeddings else "embed"], tokens), ROWS)
    for layer, (own, kind) in enumerate(zip(weights["layers"], kinds, strict=True)):
        attend = functools.partial(mixers[config.places[layer][0]], layer)
        x = run_layer(config, _LayerWeights(config, own), x, rotations[kind.rope], attend, select)
    return normalize(config, x, weights["norm"])
