"""The policy network in flax.nnx, for packed training sequences. decoding.py generates with the same weights.

layer.py defines the computation of a layer, and the switches of ModelConfig select the weights of a family. Each weight
is declared once, with its initial scale and the names of its axes. These names are the ModelConfig fields that contain
the axis sizes, so they define the shape of the weight. Norm weights are an exception: their axis `norm` is not a field.
parallel.mesh.RULES maps the names to mesh axes.

The weights of all layers are stacked, and `jax.lax.scan` applies one compiled layer to each slice. Compile time is
therefore nearly independent of the depth. If some layers have linear attention, each kind of layer has its own stack:
an outer scan applies one period of layers, such as three with linear attention and one with attention, and an inner
scan each run of equal layers. `jax.checkpoint` (remat) decides which intermediate arrays of a layer the scan keeps for
the backward pass, and which arrays the backward pass recomputes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from poly_epo_jax.model.attention import packed_attention
from poly_epo_jax.model.attention.segments import make_segments
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.experts import Routing, apply_experts, expert_load, without_experts
from poly_epo_jax.model.layer import (
    ACTIVATIONS,
    LayerKind,
    embed,
    layer_kinds,
    make_rotations,
    normalize,
    run_layer,
    select_rotation,
)
from poly_epo_jax.model.linear_attention import packed_linear_attention
from poly_epo_jax.model.matmul import matmul
from poly_epo_jax.parallel.sharding import ROWS, constrain_sharding
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
"""Arrays of a layer that are kept for the backward pass, from most to least memory. Other arrays are recomputed."""

AUTO = "auto"
"""Value of `model.remat` for which a memory plan selects one of REMAT_POLICIES (memory_plan.plan.make_plan)."""

MAX_UNROLLED_LAYERS = 4
"""Maximum number of layers that `scan_unroll=0` runs without a loop, which makes tiny models 25% faster. With several
layers per iteration, programs that XLA compiles for CPUs copy all gradients in every iteration."""


class Layer(nnx.Module):
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
            return _weight(config, rngs, ("num_layers", *axes), scale)

        def norm(size: int) -> nnx.Param:
            return _norm(config, ("num_layers", "norm"), (config.num_layers, size))

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
            self.q_norm = _norm(config, ("num_layers", "num_heads", "head_dim"))
            self.k_norm = _norm(config, ("num_layers", "num_kv_heads", "head_dim"))
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


class Transformer(nnx.Module):
    """The policy network. Maps token ids to final hidden states, which `head` maps to logits (see logprobs.py)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        axes, scale = ("vocab_size", "hidden_size"), config.hidden_size**-0.5
        self.embed = _weight(config, rngs, axes, scale)
        for name, numbers in config.stacks.items():
            stacked = dataclasses.replace(config, num_layers=len(numbers))
            setattr(self, name, Layer(stacked, rngs, name == "linear_layers"))
        self.norm = _norm(config, ("norm",), (config.hidden_size,))
        if not config.tie_word_embeddings:
            self.untied_head = _weight(config, rngs, axes, scale)

    @property
    def head(self) -> Float[Array, "V D"]:
        """Output embedding, in the compute type."""
        return (self.embed if self.config.tie_word_embeddings else self.untied_head)[...].astype(self.config.dtype)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Computes the final hidden states of packed rows.

        Attention is causal and restricted to tokens of the same segment. Segments may also share a prompt that is
        stored once, if the attention implementation supports it (see `packed_attention`).

        Args:
          tokens: Token ids.
          positions: Position of each token in its sequence.
          segment_ids: Segment of each token. 0 marks padding.

        Returns:
          Final hidden states, in the compute type.
        """
        return self.hidden_states(tokens, positions, segment_ids)[0]

    def hidden_states(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, ""]]]:
        """Computes the final hidden states of packed rows, and statistics of the routers.

        Args:
          tokens: Token ids.
          positions: Position of each token in its sequence.
          segment_ids: Segment of each token. 0 marks padding.

        Returns:
          The final hidden states, and the mean of `expert_load` over layers by the name of the metric. A dense model
          has no statistics.
        """
        config, rows = self.config, _PackedRows(self.config, positions, segment_ids)
        x = constrain_sharding(embed(config, self.embed[...], tokens), ROWS)
        x, statistics = self._apply_layers(rows, x)
        return normalize(config, x, self.norm[...].astype(config.dtype)), statistics

    def _apply_layers(
        self, rows: "_PackedRows", x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, ""]]]:
        """Applies all layers to the residual stream, and averages the statistics of their routers."""
        config = self.config
        num_periods, runs = config.periods
        split = {name: nnx.split(getattr(self, name)) for name in config.stacks}
        weights = {name: iter(_split_runs(config, own, name)) for name, (_, own) in split.items()}
        first, varying = _common_and_varying(layer_kinds(config))
        numbers = _split_runs(config, varying)
        layers = [(next(weights[name]), own) for (name, _), own in zip(runs, numbers, strict=True)]

        def layer(stack, x, own):
            weights, numbers = own
            return rows.run_layer(nnx.merge(split[stack][0], weights), first._replace(**numbers), x)

        if config.remat != "none":
            policy = REMAT_POLICIES[config.remat]
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=False, static_argnums=0)
        unroll = config.scan_unroll or (config.num_layers if config.num_layers <= MAX_UNROLLED_LAYERS else 1)

        def period(x, layers):
            """Applies the layers of one period, with a scan for each run."""
            loads = []
            for (name, size), own in zip(runs, layers, strict=True):
                x, own_loads = jax.lax.scan(functools.partial(layer, name), x, own, unroll=min(unroll, size))
                loads.append(own_loads)
            return x, loads

        x, loads = period(x, layers) if num_periods == 1 else jax.lax.scan(period, x, layers)
        return x, jax.tree.map(lambda *each: jnp.mean(jnp.concatenate([load.ravel() for load in each])), *loads)


class _PackedRows:
    """Packed rows of sequences, in which the tokens of a layer attend to each other.

    Args:
      config: Model configuration.
      positions: Position of each token in its sequence, [B, T].
      segment_ids: Segment of each token, [B, T]. 0 marks padding.
    """

    def __init__(self, config: ModelConfig, positions: jax.Array, segment_ids: jax.Array):
        self._config, self._positions, self._segment_ids = config, positions, segment_ids
        self._rotations = make_rotations(config, positions)

    def run_layer(self, layer: Layer, kind: LayerKind, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Applies a layer to the residual stream [B, T, D]. Returns the new stream and statistics of the router."""
        config, statistics = self._config, {}

        def select(routing):
            routing = without_experts(config, routing, self._segment_ids == 0)
            statistics["expert_load"] = expert_load(config, routing.experts)
            return routing

        attend = self._attend_linearly if "conv" in layer else functools.partial(self._attend, kind.window)
        x = run_layer(config, layer, x, select_rotation(self._rotations, kind.rope), attend, select)
        return constrain_sharding(x, ROWS), statistics

    def _attend(self, window, q, k, v):
        kernel, longest = self._config.attention, self._config.max_sequence_tokens
        return packed_attention(q, k, v, self._segment_ids, kernel, longest, self._positions, window)

    def _attend_linearly(self, inputs):
        return packed_linear_attention(self._config, inputs, make_segments(self._segment_ids).first)


def _common_and_varying(kinds: Sequence[LayerKind]) -> tuple[LayerKind, dict[str, Int[Array, " L"]]]:
    """Returns the numbers of the first layer, and the numbers in which L layers differ.

    Only the latter are scanned. The others are constants of the compiled program.
    """
    columns = zip(LayerKind._fields, zip(*kinds, strict=True), strict=True)
    return kinds[0], {name: jnp.asarray(column, jnp.int32) for name, column in columns if len(set(column)) > 1}


def _split_runs(config: ModelConfig, tree: Any, stack: str = "") -> list[Any]:
    """Splits arrays [layers, ...] into the runs of a period.

    Args:
      config: Model configuration.
      tree: Arrays of all layers, or of the layers of a stack.
      stack: Stack of the layers. If empty, the arrays belong to all layers.

    Returns:
      A tree of arrays [periods, size, ...], or [size, ...] if there is one period, for each run.
    """
    num_periods, runs = config.periods
    sizes = [size for name, size in runs if stack in ("", name)]
    if num_periods > 1:
        tree = jax.tree.map(lambda x: x.reshape(num_periods, -1, *x.shape[1:]), tree)
    leaves, structure = jax.tree.flatten(tree)
    # A split into one part would copy sharded weights.
    parts = [jax.lax.split(x, sizes, int(num_periods > 1)) if len(sizes) > 1 else [x] for x in leaves]
    return [structure.unflatten([part[i] for part in parts]) for i in range(len(sizes))]


def abstract_model(config: ModelConfig) -> Transformer:
    """Creates the model with the shapes and axes of its weights in place of arrays."""
    return nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))


def param_shapes(model: Transformer) -> Params:
    """Returns the shape and type of each weight of a (possibly abstract) model, as a parameter tree."""
    return nnx.to_pure_dict(nnx.split(model)[1])


def init_params(config: ModelConfig, seed: int = 0) -> Params:
    """Draws random initial weights from a seed. Returns them as a parameter tree."""
    return nnx.to_pure_dict(nnx.split(Transformer(config, nnx.Rngs(seed)))[1])


@functools.cache
def declared_weights(config: ModelConfig) -> dict[str, nnx.Param]:
    """Returns the declaration (shape and axes) of each weight, keyed by dotted path, such as `layers.q`."""
    state = nnx.split(abstract_model(config))[1]
    leaves = jax.tree.leaves_with_path(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return {jax.tree_util.keystr(path, simple=True, separator="."): param for path, param in leaves}


def _weight(config: ModelConfig, rngs: nnx.Rngs, axes: tuple[str, ...], scale: float, dtype: str = "") -> nnx.Param:
    """Draws a normal weight with standard deviation `scale`, in `dtype` or, if it is empty, in `param_dtype`."""
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
    a = _weight(config, rngs, (layers, *inputs, "lora_rank"), scale, "float32")
    return a, _weight(config, rngs, (layers, "lora_rank", *outputs), 0.0, "float32")


def _norm(config: ModelConfig, axes: tuple[str, ...], shape: tuple[int, ...] = ()) -> nnx.Param:
    """Creates a norm weight that multiplies by 1. If the shape is (), the axes are fields of the configuration."""
    shape = shape or tuple(getattr(config, axis) for axis in axes)
    return nnx.Param(jnp.full(shape, 1 - config.norm_offset, config.param_dtype), axes=axes)


def _project(x: jax.Array, param: nnx.Param) -> jax.Array:
    """Multiplies x [B, T, *in] by the weight [*in, *out] of a layer. Returns [B, T, *out]."""
    out: Any = matmul(x.reshape(-1, *x.shape[2:]), param[...], param.axes[1:])
    return out.reshape(*x.shape[:2], *out.shape[1:])
