"""Definition of a decoder layer, for packed training, prefill and cached decoding.

Activations are [*tokens, features]: packed rows [B, T, D] in training, single tokens [M, D] in prefill and decoding. A
layer reads its weights through `LayerWeights` and the other tokens through `attend`, so its callers choose the layout
of the weights (sharded stacks with adapters, or separate arrays of each layer) and the source of the keys and values.

Families differ in the weights that a layer has: `run_layer` omits norms and biases that are absent.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from poly_epo_jax.model.config import ModelConfig


@runtime_checkable
class LayerWeights(Protocol):
    """Weights of one layer, by name."""

    def __contains__(self, name: str) -> bool:
        """Returns True if the layer has this weight."""
        ...

    def vector(self, name: str) -> jax.Array:
        """Returns the weight of a norm, or a bias, in the compute type."""
        ...

    def project(self, x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
        """Multiplies x [*tokens, *in] by the weight [*in, *out]. Returns [*tokens, *out]."""
        ...


class Rotation(NamedTuple):
    """Cosines and sines of rotary angles, float32 [*tokens, 1, head_dim / 2]."""

    cos: jax.Array
    sin: jax.Array


def run_layer(
    config: ModelConfig,
    weights: LayerWeights,
    x: Float[Array, "*M D"],
    rotation: Rotation,
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> Float[Array, "*M D"]:
    """Applies a layer to the residual stream.

    Args:
      config: Model configuration.
      weights: Weights of the layer.
      x: Residual stream.
      rotation: Rotary angles of the tokens.
      attend: Function of rotated queries [*tokens, num_heads, head_dim], rotated keys and values [*tokens,
        num_kv_heads, head_dim] that returns an array of the shape of the queries.

    Returns:
      The residual stream after the layer.
    """

    def norm(x: jax.Array, name: str) -> jax.Array:
        return rms_norm(x, weights.vector(name), config.norm_eps) if name in weights else x

    def heads(h: jax.Array, name: str) -> jax.Array:
        y, bias = weights.project(h, name), f"{name}_bias"
        return norm(y + _like(weights.vector(bias), y) if bias in weights else y, f"{name}_norm")

    h = norm(x, "attention_norm")
    q, k, v = (heads(h, name) for name in ("q", "k", "v"))
    x = x + weights.project(attend(rotate(q, rotation), rotate(k, rotation), v), "o")
    h = norm(x, "mlp_norm")
    return x + weights.project(jax.nn.silu(weights.project(h, "gate")) * weights.project(h, "up"), "down")


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """Computes x / rms(x) * weight, with the mean square in float32.

    Args:
      x: Inputs. The mean square is taken over the last axis.
      weight: Scale of each element of the last axis.
      eps: Constant added to the mean square.

    Returns:
      The normalized array, in the type of x.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return _like(weight, x) * y.astype(x.dtype)


def make_rotation(config: ModelConfig, positions: Int[Array, "*M"]) -> Rotation:
    """Computes the rotary angles of tokens (RoFormer, eq. 34), once for all layers.

    Args:
      config: Model configuration.
      positions: Position of each token in its sequence.

    Returns:
      The angles.
    """
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * _like(frequencies, positions[..., None, None])
    # Without the barrier, the compiler would compute cosines and sines in every layer.
    return Rotation(*jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles))))


def rotate(x: Float[Array, "*M N D"], rotation: Rotation) -> Float[Array, "*M N D"]:
    """Applies rotary position embeddings, computed in float32.

    Args:
      x: Queries or keys. Element i of the first half of the head is rotated with element i of the second half.
      rotation: Rotary angles of the tokens.

    Returns:
      The rotated array, in the type of x.
    """
    cos, sin = rotation
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _like(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Adds leading axes of size 1 to an array, so that it has as many axes as x."""
    return vector.reshape((1,) * (x.ndim - vector.ndim) + vector.shape)
