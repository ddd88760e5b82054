"""Matmul of a layer on a mesh: the weight is gathered in the compute type, and its gradient is scattered in float32.

Without these constraints, the compiler sums gradients over devices in the type of the activations, bfloat16. On TPUs it
also computes the full sum of some gradients on every device before each device keeps its shard.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from poly_epo_jax.parallel.sharding import gather_weight, platform, split_outputs, summed_over_rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Float[Array, "M ..."], weight: Float[Array, "..."], axes: tuple[str, ...]) -> Float[Array, "M ..."]:
    """Multiplies x [M, *in] by a weight [*in, *out] that is cast to the type of x.

    Args:
      x: Inputs of M tokens.
      weight: Weight, possibly sharded.
      axes: Names of the axes of the weight, which are fields of ModelConfig.

    Returns:
      The product [M, *out], in the type of x.
    """
    return _forward(x, weight, axes)[0]


def transposed(x: Float[Array, "M K"]) -> Float[Array, "K M"]:
    """Transposes x. On CPUs, x is copied, because matmuls of a transposed view take up to 1.6 times as long."""
    return jax.lax.optimization_barrier(x.T) if platform() == "cpu" else x.T


def take_rows(x: Shaped[Array, "M ..."], indices: Int[Array, " N"]) -> Shaped[Array, "N ..."]:
    """Returns rows of x, with zeros for indices past its end."""
    return x.at[indices].get(mode="fill", fill_value=0)


def _forward(x, weight, axes):
    rows, matrix = _matrices(x, weight, axes)
    out = split_outputs(rows @ matrix, axes[x.ndim - 1 :])
    return out.reshape(len(x), *weight.shape[x.ndim - 1 :]), (x, weight)


def _backward(axes, operands, d_out):
    x, weight = operands
    rows, matrix = _matrices(x, weight, axes)
    d_out = d_out.reshape(len(x), -1)

    def product(rows, d_out):
        return jnp.matmul(transposed(rows), d_out, preferred_element_type=jnp.float32)

    d_weight = summed_over_rows(product, weight.shape, axes, x.ndim - 1)(rows, d_out)
    return (d_out @ matrix.T).reshape(x.shape), d_weight.astype(weight.dtype)


def _matrices(x, weight, axes):
    """Returns x as [M, in] and the gathered weight as [in, out]. The batched form takes twice the time on CPUs."""
    rows = x.reshape(len(x), -1)
    return rows, gather_weight(weight.astype(x.dtype), axes).reshape(rows.shape[1], -1)


matmul.defvjp(_forward, _backward)
