"""Mixture of experts: each token passes through the MLPs of the experts that a router selects for it.

No token is dropped, because log-probabilities must agree with those of the rollout servers. The pairs of a token and an
expert are sorted by expert and processed in blocks of pairs of one expert. The number of blocks depends on the routing,
so the work is proportional to the number of pairs, and no array has an entry for every expert and token.

On a mesh, each device gathers the tokens of its `expert` group, applies its own experts, and the outputs are summed and
scattered. With `experts_per_token` of at least the size of the axis, sending each token only to the devices of its
experts would not transfer less.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.matmul import take_rows, transposed
from poly_epo_jax.parallel.sharding import ROWS, constrain_sharding

MIN_BLOCK, MAX_BLOCK = 8, 256
"""Limits of the number of pairs per block. A block should not be much larger than the number of pairs of an expert."""


EXPERTS_SCOPE = "expert_blocks"
"""Part of the names of the loops over blocks in compiled programs."""


class Routing(NamedTuple):
    """Experts of each token.

    Attributes:
      experts: Indices of the selected experts.
      scales: Factors of the outputs of these experts, in float32.
    """

    experts: Int[Array, "*M K"]
    scales: Float[Array, "*M K"]


def route(config: ModelConfig, x: Float[Array, "*M D"], router: Float[Array, "D E"]) -> Routing:
    """Selects the experts with the highest probabilities for each token, in float32.

    Args:
      config: Model configuration.
      x: Inputs of the MLP.
      router: Weight of the router, in the compute type.

    Returns:
      The selected experts and their probabilities, which sum to 1 if `config.normalize_router` is set.
    """
    router = constrain_sharding(router.astype(jnp.float32), None, None)
    logits = jnp.matmul(x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
    scales, experts = jax.lax.top_k(jax.nn.softmax(logits), config.experts_per_token)
    scales = scales / scales.sum(axis=-1, keepdims=True) if config.normalize_router else scales
    return Routing(experts, scales)


def without_experts(config: ModelConfig, routing: Routing, is_padding: Bool[Array, "*M"]) -> Routing:
    """Returns the routing with index `num_experts`, which no device processes, for padding.

    All padding tokens are equal and would pass through the same experts, so that their devices would have more work
    than the others.

    Args:
      config: Model configuration.
      routing: Experts of each token.
      is_padding: Mask of the tokens whose outputs are not used.
    """
    return routing._replace(experts=jnp.where(is_padding[..., None], config.num_experts, routing.experts))


def expert_load(config: ModelConfig, experts: Int[Array, "B T K"]) -> Float[Array, ""]:
    """Returns the largest number of tokens of an expert relative to the mean of all experts.

    Args:
      config: Model configuration.
      experts: Experts of each token. Padding has none.
    """
    counts = jax.nn.one_hot(experts, config.num_experts).sum(axis=(0, 1, 2))
    return counts.max() / jnp.maximum(counts.mean(), 1.0 / config.num_experts)


def block_size(num_pairs: int, num_experts: int) -> int:
    """Returns the number of pairs per block, which is up to twice the mean number of pairs of an expert."""
    return min(MAX_BLOCK, max(MIN_BLOCK, 1 << (num_pairs // num_experts).bit_length()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def apply_experts(
    activation: Callable[[jax.Array], jax.Array], is_sharded: bool, x: Float[Array, "... D"], routing: Routing, mlp: Any
) -> Float[Array, "... D"]:
    """Computes the sum of the scaled outputs of the experts of each token.

    Args:
      activation: Activation function of the MLPs.
      is_sharded: Whether the weights are sharded over `fsdp` and `expert`. If False, each device has the weights of all
        experts, or a shard over `tensor`, and weights have no gradients on a mesh.
      x: Inputs of the MLPs.
      routing: Experts of each token.
      mlp: Weights of the experts: gate [E, D, F], up [E, D, F] and down [E, F, D].

    Returns:
      The outputs, in the type of x.
    """
    return _forward(activation, is_sharded, x, routing, mlp)[0]


def _forward(activation, is_sharded, x, routing, mlp):
    num_experts = len(mlp[0])

    def local(axes, x, routing, mlp):
        shape, (x, routing) = x.shape, _gather_tokens(axes, x, routing)
        gate, up, down = _gather_weights(axes, x.dtype, mlp)
        blocks = _local_blocks(axes, num_experts, len(gate), routing)

        def add_block(i, y):
            expert, token, pair = blocks.take(i)
            rows = take_rows(x, token)
            hidden = activation(rows @ gate[expert]) * (rows @ up[expert])
            out = jnp.matmul(hidden, down[expert], preferred_element_type=jnp.float32)
            return y.at[token].add(out * take_rows(routing.scales.reshape(-1), pair)[:, None], mode="drop")

        with jax.named_scope(EXPERTS_SCOPE):
            y = jax.lax.fori_loop(0, blocks.count, add_block, jnp.zeros(x.shape, jnp.float32))
        return _scatter_tokens(axes, y).reshape(shape).astype(x.dtype)

    return _on_each_device(local, is_sharded, (x, routing, mlp), PartitionSpec(ROWS)), (x, routing, mlp)


def _backward(activation, is_sharded, operands, d_out):
    num_experts = len(operands[2][0])

    def local(axes, x, routing, mlp, d_out):
        shapes = x.shape, routing.scales.shape
        x, routing, d_out = *_gather_tokens(axes, x, routing), _gather_rows(axes, d_out.reshape(-1, x.shape[-1]))
        gate, up, down = weights = _gather_weights(axes, x.dtype, mlp)
        blocks = _local_blocks(axes, num_experts, len(gate), routing)

        def product(rows, columns):
            return jnp.matmul(transposed(rows), columns, preferred_element_type=jnp.float32)

        def add_block(i, gradients):
            d_x, d_scales, d_gate, d_up, d_down = gradients
            expert, token, pair = blocks.take(i)
            rows, d_rows = take_rows(x, token), take_rows(d_out, token)
            scale = take_rows(routing.scales.reshape(-1), pair)[:, None]
            hidden, pullback = jax.vjp(lambda g, u: activation(g) * u, rows @ gate[expert], rows @ up[expert])
            d_hidden = jnp.matmul(d_rows, down[expert].T, preferred_element_type=jnp.float32)
            d_scale = jnp.sum(hidden * d_hidden, axis=1)
            d_g, d_u = pullback((scale * d_hidden).astype(x.dtype))
            d_row = jnp.matmul(d_g, gate[expert].T, preferred_element_type=jnp.float32)
            d_row += jnp.matmul(d_u, up[expert].T, preferred_element_type=jnp.float32)
            return (
                d_x.at[token].add(d_row, mode="drop"),
                d_scales.at[pair].set(d_scale, mode="drop"),
                d_gate.at[expert].add(product(rows, d_g)),
                d_up.at[expert].add(product(rows, d_u)),
                d_down.at[expert].add(product((scale * hidden).astype(x.dtype), d_rows)),
            )

        zeros = [jnp.zeros(shape, jnp.float32) for shape in (x.shape, routing.scales.size, *(w.shape for w in weights))]
        with jax.named_scope(EXPERTS_SCOPE):
            d_x, d_scales, *d_mlp = jax.lax.fori_loop(0, blocks.count, add_block, tuple(zeros))
        d_scales = _scatter_tokens(axes, d_scales.reshape(routing.scales.shape)).reshape(shapes[1])
        d_mlp = [_sum_weights(axes, d, axis).astype(w.dtype) for d, w, axis in zip(d_mlp, mlp, FSDP_AXES, strict=True)]
        return _scatter_tokens(axes, d_x).reshape(shapes[0]).astype(x.dtype), d_scales, tuple(d_mlp)

    out_specs = PartitionSpec(ROWS), PartitionSpec(ROWS), _weight_specs(is_sharded)
    d_x, d_scales, d_mlp = _on_each_device(local, is_sharded, (*operands, d_out), out_specs)
    return d_x, Routing(None, d_scales), d_mlp  # pyright: ignore[reportArgumentType]


apply_experts.defvjp(_forward, _backward)

FSDP_AXES = (1, 1, 2)
"""Axis of the weights of gate, up and down that is sharded over `fsdp`."""


class _Blocks:
    """Blocks of pairs of a token and a local expert, sorted by expert. The last block of an expert may be incomplete.

    Args:
      num_experts: Number of experts of all devices, which determines the number of pairs per block.
      num_local: Number of local experts.
      experts: Local index of the experts of each token. The pairs of other indices are not processed.
    """

    def __init__(self, num_experts: int, num_local: int, experts: Int[Array, "M K"]):
        self._per_token, self._num_pairs = experts.shape[1], experts.size
        self._size = block_size(experts.size, num_experts)
        is_local = (experts >= 0) & (experts < num_local)
        pairs = jnp.where(is_local, experts, num_local).reshape(-1)
        self._order = jnp.argsort(pairs)
        self._ends = jnp.searchsorted(pairs[self._order], jnp.arange(num_local), side="right")
        self._starts = jnp.concatenate([jnp.zeros(1, self._ends.dtype), self._ends[:-1]])
        self._blocks = -(-(self._ends - self._starts) // self._size)
        self._last = jnp.cumsum(self._blocks)
        self.count = self._last[-1]

    def take(self, index: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, " S"], Int[Array, " S"]]:
        """Returns the expert, the tokens and the pairs of a block. Unused elements point past the last token."""
        expert = jnp.searchsorted(self._last, index, side="right")
        first = self._starts[expert] + (index - self._last[expert] + self._blocks[expert]) * self._size
        places = first + jnp.arange(self._size)
        pair = self._order.at[places].get(mode="fill", fill_value=self._num_pairs)
        pair = jnp.where(places < self._ends[expert], pair, self._num_pairs)
        return expert, pair // self._per_token, pair


def _on_each_device(function, is_sharded, operands, out_specs):
    """Calls `function(axes, *operands)` with the shards of each device. The mesh axes need collectives.

    Inside shard_map, as in decoding, each device has its own rows and all experts, and the compiler handles `tensor`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return function((), *operands)
    split = [axis for axis, size in mesh.shape.items() if size > 1]
    axes = tuple(split if is_sharded else [axis for axis in split if axis == "tensor"])
    rows = PartitionSpec(ROWS)
    in_specs = (rows, Routing(rows, rows), _weight_specs(is_sharded), rows)[: len(operands)]  # pyright: ignore
    local = functools.partial(function, axes)
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*operands)


def _weight_specs(is_sharded):
    expert, fsdp = ("expert", "fsdp") if is_sharded else (None, None)
    wide = PartitionSpec(expert, fsdp, "tensor")
    return wide, wide, PartitionSpec(expert, "tensor", fsdp)


def _local_blocks(axes, num_experts, num_local, routing):
    first = jax.lax.axis_index("expert") * num_local if "expert" in axes else 0
    return _Blocks(num_experts, num_local, routing.experts - first)


def _gather_rows(axes, x):
    return jax.lax.all_gather(x, "expert", tiled=True) if "expert" in axes else x


def _gather_tokens(axes, x, routing):
    """Returns the inputs [M, D] and the routing [M, K] of the tokens of all devices along `expert`."""
    flat = (y.reshape(-1, y.shape[-1]) for y in (x, *routing))
    x, *routing = (_gather_rows(axes, y) for y in flat)
    return x, Routing(*routing)


def _scatter_tokens(axes, y):
    """Sums over the experts and the parts of MLPs of all devices. Returns the sums of the local tokens."""
    y = jax.lax.psum(y, "tensor") if "tensor" in axes else y
    return jax.lax.psum_scatter(y, "expert", tiled=True) if "expert" in axes else y


def _gather_weights(axes, dtype, mlp):
    weights = [weight.astype(dtype) for weight in mlp]
    if "fsdp" not in axes:
        return weights
    return [jax.lax.all_gather(w, "fsdp", axis=axis, tiled=True) for w, axis in zip(weights, FSDP_AXES, strict=True)]


def _sum_weights(axes, gradient, fsdp_axis):
    """Sums the gradient of a weight over the rows of all devices. Each device keeps its shard."""
    if "fsdp" in axes:
        gradient = jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=fsdp_axis, tiled=True)
    return jax.lax.psum(gradient, "data") if "data" in axes else gradient
