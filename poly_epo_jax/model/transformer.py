"""The policy network in flax.nnx, for packed training sequences. decoding.py generates with the same weights.

layer.py defines the computation of a layer, and layer_stack.py declares the weights of all layers, which are stacked.
`jax.lax.scan` applies one compiled layer to each slice. Compile time is therefore nearly independent of the depth. If
some layers have linear attention, each kind of layer has its own stack: an outer scan applies one period of layers,
such as three with linear attention and one with attention, and an inner scan each run of equal layers. `jax.checkpoint`
(remat) decides which intermediate arrays of a layer the scan keeps for the backward pass, and which arrays the backward
pass recomputes.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from poly_epo_jax.model.attention import packed_attention
from poly_epo_jax.model.attention.segments import make_segments
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.experts import expert_load, without_experts
from poly_epo_jax.model.layer import (
    LayerKind,
    embed,
    layer_kinds,
    make_rotations,
    normalize,
    run_layer,
    select_rotation,
)
from poly_epo_jax.model.layer_stack import LayerStack, norm_param, weight_param
from poly_epo_jax.model.linear_attention import packed_linear_attention
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


class Transformer(nnx.Module):
    """The policy network. Maps token ids to final hidden states, which `head` maps to logits (see logprobs.py)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        axes, scale = ("vocab_size", "hidden_size"), config.hidden_size**-0.5
        self.embed = weight_param(config, rngs, axes, scale)
        for name, numbers in config.stacks.items():
            stacked = dataclasses.replace(config, num_layers=len(numbers))
            setattr(self, name, LayerStack(stacked, rngs, name == "linear_layers"))
        self.norm = norm_param(config, ("norm",), (config.hidden_size,))
        if not config.tie_word_embeddings:
            self.untied_head = weight_param(config, rngs, axes, scale)

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

    def run_layer(self, layer: LayerStack, kind: LayerKind, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
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
