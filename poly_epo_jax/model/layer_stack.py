"""Weights of the layers of a model in flax.nnx, stacked along their first axis, as training stores them.

The switches of ModelConfig select the weights of a family. Each weight is declared once, with its initial scale and the
names of its axes. These names are the ModelConfig fields that contain the axis sizes, so they define the shape of the
weight. Norm weights are an exception: their axis `norm` is not a field. parallel.mesh.RULES maps the names to mesh
axes.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.experts import Routing, apply_experts
from poly_epo_jax.model.layer import ACTIVATIONS
from poly_epo_jax.model.matmul import matmul


class LayerStack(nnx.Module):
    """Weights of several layers, stacked on axis 0. A slice of it contains the weights that `run_layer` reads.

    Args:
      config: Configuration of the model. Its number of layers is the number of stacked layers.
      rngs: Random number generators.
      is_linear: Whether the layers have linear attention.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, is_linear: bool = False):
        self.config = config
        # With the factor `residual`, the variance of the final residual stream does not grow with the number of layers.
        d, residual = config.hidden_size, (2 * config.num_layers) ** -0.5

        def weight(*axes: str, scale: float) -> nnx.Param:
            return weight_param(config, rngs, ("num_layers", *axes), scale)

        def norm(size: int) -> nnx.Param:
            return norm_param(config, ("num_layers", "norm"), (config.num_layers, size))

        if config.pre_norm:
            self.attention_norm = norm(d)
            self.mlp_norm = norm(d)
        if config.post_norm:
            self.attention_post_norm = norm(d)
            self.mlp_post_norm = norm(d)
        if is_linear:
            self._add_linear_attention(weight, residual)
        else:
            self._add_attention(weight, norm, residual)
        experts = ("num_experts",) if config.num_experts else ()
        if experts:
            self.router = weight("hidden_size", "num_experts", scale=d**-0.5)
        self.gate = weight(*experts, "hidden_size", "mlp_size", scale=d**-0.5)
        self.up = weight(*experts, "hidden_size", "mlp_size", scale=d**-0.5)
        self.down = weight(*experts, "mlp_size", "hidden_size", scale=config.mlp_size**-0.5 * residual)
        for name in filter(self.__contains__, config.lora_targets):
            for part, param in zip("ab", _adapter(config, rngs, getattr(self, name).axes), strict=True):
                setattr(self, f"{name}_lora_{part}", param)

    def _add_attention(self, weight: Callable[..., nnx.Param], norm: Callable[[int], nnx.Param], residual: float):
        config = self.config
        scale, heads_width = config.hidden_size**-0.5, config.num_heads * config.head_dim
        self.q = weight("hidden_size", "num_heads", "query_width", scale=scale)
        self.k = weight("hidden_size", "num_kv_heads", "head_dim", scale=scale)
        self.v = weight("hidden_size", "num_kv_heads", "head_dim", scale=scale)
        self.o = weight("num_heads", "head_dim", "hidden_size", scale=heads_width**-0.5 * residual)
        if config.joint_qk_norm:
            self.q_norm = norm_param(config, ("num_layers", "num_heads", "head_dim"))
            self.k_norm = norm_param(config, ("num_layers", "num_kv_heads", "head_dim"))
        elif config.qk_norm:
            self.q_norm = norm(config.head_dim)
            self.k_norm = norm(config.head_dim)
        if config.attention_bias:
            self.q_bias = weight("num_heads", "head_dim", scale=0.0)
            self.k_bias = weight("num_kv_heads", "head_dim", scale=0.0)
            self.v_bias = weight("num_kv_heads", "head_dim", scale=0.0)

    def _add_linear_attention(self, weight: Callable[..., nnx.Param], residual: float):
        config, heads, head_dim = self.config, "linear_value_heads", "linear_value_dim"
        scale, heads_width = config.hidden_size**-0.5, config.linear_value_heads * config.linear_value_dim
        self.qkv = weight("hidden_size", "linear_channels", scale=scale)
        self.output_gate = weight("hidden_size", heads, head_dim, scale=scale)
        self.beta = weight("hidden_size", heads, scale=scale)
        self.time_step = weight("hidden_size", heads, scale=scale)
        self.time_step_bias = weight(heads, scale=0.0)
        self.log_decay_rate = weight(heads, scale=0.0)
        self.conv = weight("conv_size", "linear_channels", scale=config.conv_size**-0.5)
        # The offset of other norms does not apply to this weight.
        self.value_norm = nnx.Param(weight(head_dim, scale=0.0)[...] + 1, axes=("num_layers", head_dim))
        self.o = weight(heads, head_dim, "hidden_size", scale=heads_width**-0.5 * residual)

    def __contains__(self, name: str) -> bool:
        """Returns True if the layer has this weight."""
        return hasattr(self, name)

    def vector(self, name: str) -> jax.Array:
        """Returns the weight of a norm or router, or a bias, in the compute type."""
        return getattr(self, name)[...].astype(self.config.dtype)

    def project(self, x: jax.Array, name: str) -> jax.Array:
        """Computes x W, or x W + (alpha / rank) (x A) B if the weight has an adapter (LoRA, eq. 3)."""
        y, config = _project(x, getattr(self, name)), self.config
        if name not in config.lora_targets:
            return y
        inner = config.lora_scale * _project(x, getattr(self, f"{name}_lora_a"))
        return y + _project(inner, getattr(self, f"{name}_lora_b"))

    def apply_experts(self, x: jax.Array, routing: Routing) -> jax.Array:
        """Applies the experts of each token to x."""
        mlp = self.gate[...], self.up[...], self.down[...]
        return apply_experts(ACTIVATIONS[self.config.activation], True, x, routing, mlp)


def weight_param(
    config: ModelConfig, rngs: nnx.Rngs, axes: tuple[str, ...], scale: float, dtype: str = ""
) -> nnx.Param:
    """Draws a normal weight.

    Args:
      config: Model configuration.
      rngs: Random number generators.
      axes: Names of the axes, which are fields of the configuration.
      scale: Standard deviation.
      dtype: Type of the weight. If empty, `config.param_dtype`.

    Returns:
      The weight, with the names of its axes.
    """
    shape = tuple(getattr(config, axis) for axis in axes)
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape, dtype or config.param_dtype), axes=axes)


def _adapter(config: ModelConfig, rngs: nnx.Rngs, axes: tuple[str, ...]) -> tuple[nnx.Param, nnx.Param]:
    """Creates A [*in, rank] and B [rank, *out] for a weight [*in, *out], stacked over layers, in float32.

    A is random and B is zero, so that training starts from the base policy (LoRA, section 4.1).
    """
    layers, *rest = axes
    num_inputs = 1 if rest[0] == "hidden_size" else len(rest) - 1  # one side of each weight is the residual stream
    inputs, outputs = rest[:num_inputs], rest[num_inputs:]
    scale = math.prod(getattr(config, axis) for axis in inputs) ** -0.5
    a = weight_param(config, rngs, (layers, *inputs, "lora_rank"), scale, "float32")
    return a, weight_param(config, rngs, (layers, "lora_rank", *outputs), 0.0, "float32")


def norm_param(config: ModelConfig, axes: tuple[str, ...], shape: tuple[int, ...] = ()) -> nnx.Param:
    """Creates the weight of a norm, which multiplies by 1.

    Args:
      config: Model configuration.
      axes: Names of the axes.
      shape: Shape of the weight. If (), the axes are fields of the configuration, which contain their sizes.

    Returns:
      The weight, with the names of its axes.
    """
    shape = shape or tuple(getattr(config, axis) for axis in axes)
    return nnx.Param(jnp.full(shape, 1 - config.norm_offset, config.param_dtype), axes=axes)


def _project(x: jax.Array, param: nnx.Param) -> jax.Array:
    """Multiplies x [B, T, *in] by the weight [*in, *out] of a layer. Returns [B, T, *out]."""
    out: Any = matmul(x.reshape(-1, *x.shape[2:]), param[...], param.axes[1:])
    return out.reshape(*x.shape[:2], *out.shape[1:])
