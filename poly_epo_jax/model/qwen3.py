"""Qwen3 in flax.nnx: stacked layers run by one scan, remat by one word, packed training (`decoding` decodes).

Two switches turn the same code into its relatives: without `qk_norm` it is Llama, and with `attention_bias` Qwen2.
Each weight is declared once, with its initial scale and its axes. The axes are named after the fields of ModelConfig
that give their sizes, so they also define the weight's shape; parallel.mesh.RULES maps them to the mesh.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from poly_epo_jax.model.attention import packed_attention
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.matmul import matmul
from poly_epo_jax.parallel.sharding import ROWS, pinned
from poly_epo_jax.types import Params

REMAT_POLICIES = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names("attention"),
    ),
    "attention": jax.checkpoint_policies.save_only_these_names("attention"),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What is kept for the backward pass, the most first; it recomputes the rest."""

AUTO = "auto"
"""Stands for one of these in a configuration, until a memory plan has chosen it (memory_plan.plan.make_plan)."""

FEW_LAYERS = 4
"""So many run without a loop, unless the configuration says otherwise: tiny models are a quarter faster so. In a loop
over several layers per step, XLA's programs for CPUs copy all gradients at every step."""


class Layer(nnx.Module):
    """A pre-norm decoder layer. Its weights are stacked over layers on axis 0; the scan calls it on one slice."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        # `residual` keeps the variance of the residual stream near one at any depth.
        d, residual = config.hidden_size, (2 * config.num_layers) ** -0.5

        def weight(*axes: str, scale: float) -> nnx.Param:
            return _weight(config, rngs, ("num_layers", *axes), scale)

        def norm(size: int) -> nnx.Param:
            return _norm(config, ("num_layers", "norm"), (config.num_layers, size))

        self.attention_norm = norm(d)
        self.q = weight("hidden_size", "num_heads", "head_dim", scale=d**-0.5)
        self.k = weight("hidden_size", "num_kv_heads", "head_dim", scale=d**-0.5)
        self.v = weight("hidden_size", "num_kv_heads", "head_dim", scale=d**-0.5)
        heads_width = config.num_heads * config.head_dim
        self.o = weight("num_heads", "head_dim", "hidden_size", scale=heads_width**-0.5 * residual)
        if config.qk_norm:
            self.q_norm = norm(config.head_dim)
            self.k_norm = norm(config.head_dim)
        if config.attention_bias:
            self.q_bias = weight("num_heads", "head_dim", scale=0.0)
            self.k_bias = weight("num_kv_heads", "head_dim", scale=0.0)
            self.v_bias = weight("num_kv_heads", "head_dim", scale=0.0)
        self.mlp_norm = norm(d)
        self.gate = weight("hidden_size", "mlp_size", scale=d**-0.5)
        self.up = weight("hidden_size", "mlp_size", scale=d**-0.5)
        self.down = weight("mlp_size", "hidden_size", scale=config.mlp_size**-0.5 * residual)
        for name in config.lora_targets:
            for part, param in zip("ab", _adapter(config, rngs, getattr(self, name).axes), strict=True):
                setattr(self, f"{name}_lora_{part}", param)

    def __call__(self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """x [B, T, d] -> x."""
        config = self.config

        def w(param: nnx.Param) -> jax.Array:
            return param[...].astype(config.dtype)

        h = rms_norm(x, w(self.attention_norm), config.norm_eps)
        q, k, v = (self._project(h, name) for name in ("q", "k", "v"))
        if config.attention_bias:
            q, k, v = q + w(self.q_bias)[None, None], k + w(self.k_bias)[None, None], v + w(self.v_bias)[None, None]
        if config.qk_norm:
            q = rms_norm(q, w(self.q_norm), config.norm_eps)
            k = rms_norm(k, w(self.k_norm), config.norm_eps)
        q, k = rope(q, positions, config.rope_theta), rope(k, positions, config.rope_theta)
        attended = packed_attention(q, k, v, segment_ids, config.attention, config.longest_sequence, positions)
        x = x + self._project(attended, "o")
        h = rms_norm(x, w(self.mlp_norm), config.norm_eps)
        return x + self._project(jax.nn.silu(self._project(h, "gate")) * self._project(h, "up"), "down")

    def _project(self, x: jax.Array, name: str) -> jax.Array:
        """x W, or x W + (alpha / rank) (x A) B where the weight has an adapter (LoRA, eq. 3)."""
        y, config = _project(x, getattr(self, name)), self.config
        if name not in config.lora_targets:
            return y
        inner = config.lora_scale * _project(x, getattr(self, f"{name}_lora_a"))
        return y + _project(inner, getattr(self, f"{name}_lora_b"))


class Qwen3(nnx.Module):
    """The policy pi: token ids to final hidden states; `head` turns those into logits (see `logprobs`)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        axes, scale = ("vocab_size", "hidden_size"), config.hidden_size**-0.5
        self.embed = _weight(config, rngs, axes, scale)
        self.layers = Layer(config, rngs)
        self.norm = _norm(config, ("norm",), (config.hidden_size,))
        if not config.tied_head:
            self.untied_head = _weight(config, rngs, axes, scale)

    @property
    def head(self) -> Float[Array, "V D"]:
        """The output embedding, in the compute type."""
        return (self.embed if self.config.tied_head else self.untied_head)[...].astype(self.config.dtype)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Final hidden states of packed rows: causal, and only within equal `segment_ids` (0 is padding).

        Segments of one prompt may share it, if the attention supports this: see `packed_attention`.
        """
        config = self.config
        layer_def, weights = nnx.split(self.layers)

        def step(x, weights):
            return pinned(nnx.merge(layer_def, weights)(x, positions, segment_ids), ROWS), None

        if config.remat != "none":
            step = jax.checkpoint(step, policy=REMAT_POLICIES[config.remat], prevent_cse=False)
        x = pinned(self.embed[...][tokens].astype(config.dtype), ROWS)
        unroll = config.scan_unroll or (config.num_layers if config.num_layers <= FEW_LAYERS else 1)
        x, _ = jax.lax.scan(step, x, weights, unroll=unroll)
        return rms_norm(x, self.norm[...].astype(config.dtype), config.norm_eps)


def abstract_model(config: ModelConfig) -> Qwen3:
    """The model's structure, with the shapes and axes of its weights in place of arrays."""
    return nnx.eval_shape(lambda: Qwen3(config, nnx.Rngs(0)))


def param_shapes(model: Qwen3) -> Params:
    """The shape and type of each weight of a (possibly abstract) model."""
    return nnx.to_pure_dict(nnx.split(model)[1])


def first_params(config: ModelConfig, seed: int = 0) -> Params:
    """Random weights."""
    return nnx.to_pure_dict(nnx.split(Qwen3(config, nnx.Rngs(seed)))[1])


@functools.cache
def declared_weights(config: ModelConfig) -> dict[str, nnx.Param]:
    """Each weight's declaration, its shape and axes, by its dotted path, such as `layers.q`."""
    state = nnx.split(abstract_model(config))[1]
    leaves = jax.tree.leaves_with_path(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return {jax.tree_util.keystr(path, simple=True, separator="."): param for path, param in leaves}


def _weight(config: ModelConfig, rngs: nnx.Rngs, axes: tuple[str, ...], scale: float, dtype: str = "") -> nnx.Param:
    """Normal with standard deviation `scale`, of param_dtype if no other type is given."""
    shape = tuple(getattr(config, axis) for axis in axes)
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape, dtype or config.param_dtype), axes=axes)


def _adapter(config: ModelConfig, rngs: nnx.Rngs, axes: tuple[str, ...]) -> tuple[nnx.Param, nnx.Param]:
    """A [*in, rank] and B [rank, *out] for weights [*in, *out], both with the layers' axis first, in float32.

    A is random and B zero, so that training begins with the base policy (LoRA, section 4.1).
    """
    layers, *rest = axes
    num_inputs = 1 if rest[0] == "hidden_size" else len(rest) - 1  # one side of each weight is the residual stream
    inputs, outputs = rest[:num_inputs], rest[num_inputs:]
    scale = math.prod(getattr(config, axis) for axis in inputs) ** -0.5
    a = _weight(config, rngs, (layers, *inputs, "lora_rank"), scale, "float32")
    return a, _weight(config, rngs, (layers, "lora_rank", *outputs), 0.0, "float32")


def _norm(config: ModelConfig, axes: tuple[str, ...], shape: tuple[int, ...]) -> nnx.Param:
    """Ones, which no axis of the mesh splits."""
    return nnx.Param(jnp.ones(shape, config.param_dtype), axes=axes)


def _project(x: jax.Array, param: nnx.Param) -> jax.Array:
    """x [B, T, *in] times a layer's weight [*in, *out]: [B, T, *out]."""
    out: Any = matmul(x.reshape(-1, *x.shape[2:]), param[...], param.axes[1:])
    return out.reshape(*x.shape[:2], *out.shape[1:])


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """x / rms(x) * weight; the mean square is taken in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return weight.reshape((1,) * (x.ndim - 1) + weight.shape) * y.astype(x.dtype)


def rope(x: Float[Array, "B T N D"], positions: Int[Array, "B T"], theta: float) -> Float[Array, "B T N D"]:
    """Rotary position embedding (RoFormer, eq. 34) on halves of the head dimension, in float32."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
