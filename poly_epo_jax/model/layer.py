"""Definition of a decoder layer, for packed training, prefill and cached decoding.

Activations are [*tokens, features]: packed rows [B, T, D] in training, single tokens [M, D] in prefill and decoding. A
layer reads its weights through `LayerWeights` and the other tokens through `attend`, so its callers choose the layout
of the weights (sharded stacks with adapters, or separate arrays of each layer) and the source of the keys and values.

Families differ in the weights that a layer has: `run_layer` omits norms and biases that are absent, and computes linear
attention if the layer has the weights of its convolution. The shape of the weight of a norm selects the normalized
values: [head_dim] for each head, [heads, head_dim] for all heads together. Layers with the same weights differ only in
numbers (`LayerKind`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.experts import Routing, route
from poly_epo_jax.model.linear_attention import LinearInputs
from poly_epo_jax.model.rope import Rope, Rotation, make_rotation, rotate

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True)}
"""Activation functions of the MLP, by their names in Hugging Face configurations."""

UNLIMITED = 1 << 30
"""Window that is longer than any sequence."""


@runtime_checkable
class LayerWeights(Protocol):
    """Weights of one layer, by name."""

    def __contains__(self, name: str) -> bool:
        """Returns True if the layer has this weight."""
        ...

    def vector(self, name: str) -> jax.Array:
        """Returns the weight of a norm, router or convolution, or a bias, in the compute type."""
        ...

    def project(self, x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
        """Multiplies x [*tokens, *in] by the weight [*in, *out]. Returns [*tokens, *out]."""
        ...

    def apply_experts(self, x: Float[Array, "..."], routing: Routing) -> Float[Array, "..."]:
        """Applies the experts of each token to x [*tokens, D], with the weights `gate`, `up` and `down`."""
        ...


class LayerKind(NamedTuple):
    """Numbers in which layers with the same weights differ. They may be traced, so that a scan can pass them to layers.

    Attributes:
      window: Number of tokens that a token sees, including itself. 0, which is never traced, disables the window.
      rope: Index of the layer's element of `make_rotations`.
    """

    window: Any
    rope: Any


def layer_kinds(config: ModelConfig) -> list[LayerKind]:
    """Returns the numbers of each layer. If only some layers have a window, the windows of the others are UNLIMITED."""
    unlimited, ropes = UNLIMITED if any(config.layer_windows) else 0, _distinct_ropes(config)
    layers = zip(config.layer_windows, config.layer_ropes, strict=True)
    return [LayerKind(window or unlimited, ropes.index(rope)) for window, rope in layers]


def make_rotations(config: ModelConfig, positions: Int[Array, "*M"]) -> list[Rotation]:
    """Computes the rotary angles of tokens, once for all layers that share them.

    Args:
      config: Model configuration.
      positions: Position of each token in its sequence.

    Returns:
      The angles of each distinct element of `config.ropes`.
    """
    return [make_rotation(rope, config.head_dim, positions) for rope in _distinct_ropes(config)]


def select_rotation(rotations: Sequence[Rotation], index: Any) -> Rotation:
    """Returns the element with an index that may be traced."""
    if isinstance(index, int):
        return rotations[index]
    return jax.tree.map(lambda *each: jax.lax.select_n(index, *each), *rotations)


def run_layer(
    config: ModelConfig,
    weights: LayerWeights,
    x: Float[Array, "*M D"],
    rotation: Rotation,
    attend: Callable[..., jax.Array],
    select: Callable[[Routing], Routing] = lambda routing: routing,
) -> Float[Array, "*M D"]:
    """Applies a layer to the residual stream.

    Args:
      config: Model configuration.
      weights: Weights of the layer.
      x: Residual stream.
      rotation: Rotary angles of the tokens.
      attend: Function of rotated queries [*tokens, num_heads, head_dim], rotated keys and values [*tokens,
        num_kv_heads, head_dim] that returns an array of the shape of the queries. In a layer with linear attention,
        function of LinearInputs that returns [*tokens, linear_value_heads, linear_value_dim].
      select: Function of the routing of the tokens, if the layer has experts, that returns the routing to apply.

    Returns:
      The residual stream after the layer.
    """

    def norm(x: jax.Array, name: str) -> jax.Array:
        return normalize(config, x, weights.vector(name)) if name in weights else x

    def attention(h: jax.Array) -> jax.Array:
        # Without the barrier, XLA for TPUs stores float32 broadcasts of the norms' statistics in the matmuls' shape.
        q, k, v = jax.lax.optimization_barrier([weights.project(h, name) for name in ("q", "k", "v")])
        q, gate = jnp.split(q, 2, axis=-1) if config.gated_attention else (q, None)
        q, k, v = (
            norm(y + _like(weights.vector(bias), y) if (bias := f"{name}_bias") in weights else y, f"{name}_norm")
            for name, y in (("q", q), ("k", k), ("v", v))
        )
        if config.query_size not in (0, config.head_dim):
            q = q * (config.head_dim / config.query_size) ** 0.5  # Attention divides by the root of head_dim.
        attended = attend(rotate(q, rotation), rotate(k, rotation), v)
        return attended if gate is None else attended * jax.nn.sigmoid(gate)

    def linear_attention(h: jax.Array) -> jax.Array:
        def vector(name: str) -> jax.Array:
            return _like(weights.vector(name).astype(jnp.float32), h)

        step = weights.project(h, "time_step").astype(jnp.float32) + vector("time_step_bias")
        log_decay = -jnp.exp(vector("log_decay_rate")) * jax.nn.softplus(step)
        beta = jax.nn.sigmoid(weights.project(h, "beta"))
        y = attend(LinearInputs(weights.project(h, "qkv"), weights.vector("conv"), log_decay, beta))
        normalized: Any = rms_norm(y, weights.vector("value_norm"), config.norm_eps)
        return (normalized * jax.nn.silu(weights.project(h, "output_gate").astype(jnp.float32))).astype(h.dtype)

    h = norm(x, "attention_norm")
    attended = linear_attention(h) if "conv" in weights else attention(h)
    x = x + norm(weights.project(attended, "o"), "attention_post_norm")
    h = norm(x, "mlp_norm")
    if config.num_experts:
        routing = select(route(config, h, weights.vector("router")))
        return x + norm(weights.apply_experts(h, routing), "mlp_post_norm")
    activated = ACTIVATIONS[config.activation](weights.project(h, "gate"))
    return x + norm(weights.project(activated * weights.project(h, "up"), "down"), "mlp_post_norm")


def embed(config: ModelConfig, table: Float[Array, "V D"], tokens: Int[Array, "*M"]) -> Float[Array, "*M D"]:
    """Returns the embeddings of tokens in the compute type, which are the input of the first layer.

    Args:
      config: Model configuration.
      table: Embedding of each token id.
      tokens: Token ids.

    Returns:
      The residual stream before the first layer.
    """
    x = table[tokens].astype(config.dtype)
    return x * jnp.asarray(config.hidden_size**0.5, x.dtype) if config.scale_embeddings else x


def normalize(config: ModelConfig, x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """Applies the RMS norm of the model, see `rms_norm`.

    Args:
      config: Model configuration.
      x: Inputs.
      weight: Weight of the norm.

    Returns:
      The normalized array, in the type of x.
    """
    weight = weight.astype(jnp.float32) if config.float32_norm else weight
    return rms_norm(x, weight + config.norm_offset if config.norm_offset else weight, config.norm_eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Float[Array, "..."], weight: Float[Array, "..."], eps: float) -> Float[Array, "..."]:
    """Computes x / rms(x) * weight, with the mean square in float32, and the product in the type of the weight.

    The gradients are written out, because XLA for TPUs computes them in fewer passes over the arrays.

    Args:
      x: Inputs. The mean square is taken over as many of the last axes as the weight has.
      weight: Scale of each element of these axes.
      eps: Constant added to the mean square.

    Returns:
      The normalized array, in the type of x.
    """
    return (_like(weight, x) * _divide_by_rms(x, weight, eps)[0].astype(weight.dtype)).astype(x.dtype)


def _norm_gradients(eps, inputs, d_out):
    (x, weight), d_out = inputs, d_out.astype(jnp.float32)
    y, inverse_rms = _divide_by_rms(x, weight, eps)
    d_y = d_out * _like(weight, x).astype(jnp.float32)
    d_x = inverse_rms * (d_y - y * _mean(d_y * y, weight))
    return d_x.astype(x.dtype), jnp.sum(d_out * y, axis=tuple(range(x.ndim - weight.ndim))).astype(weight.dtype)


rms_norm.defvjp(lambda x, weight, eps: (rms_norm(x, weight, eps), (x, weight)), _norm_gradients)


def _divide_by_rms(x, weight, eps):
    """Returns x / rms(x) and 1 / rms(x), in float32."""
    x = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(_mean(x * x, weight) + eps)
    return x * inverse_rms, inverse_rms


def _mean(x, weight):
    return jnp.mean(x, axis=tuple(range(-weight.ndim, 0)), keepdims=True)


def _distinct_ropes(config: ModelConfig) -> list[Rope]:
    return list(dict.fromkeys(config.layer_ropes))


def _like(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Adds leading axes of size 1 to an array, so that it has as many axes as x."""
    return vector.reshape((1,) * (x.ndim - vector.ndim) + vector.shape)
