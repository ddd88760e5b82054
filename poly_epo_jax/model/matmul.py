"""The matmul of a layer on a mesh: its weight is gathered in the compute type, its gradient scattered in float32.

Left to itself, the compiler sums gradients over devices in the activations' type, bfloat16; and on TPUs it sums some of
them in full on every device before each device keeps its part.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from poly_epo_jax.parallel.sharding import gather_weight, platform, split_outputs, summed_over_rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Float[Array, "M ..."], weight: Float[Array, "..."], axes: tuple[str, ...]) -> Float[Array, "M ..."]:
    """x [M, *in] times a weight [*in, *out], which is cast to the type of x: [M, *out].

    Args:
      axes: the weight's axes as declared: fields of ModelConfig.
    """
    return _forward(x, weight, axes)[0]


def transposed(x: Float[Array, "M K"]) -> Float[Array, "K M"]:
    """x', copied on a CPU: matmuls that read a matrix against its layout take up to 1.6 times as long there."""
    return jax.lax.optimization_barrier(x.T) if platform() == "cpu" else x.T


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
    """x [M, in] and the gathered weight [in, out]; XLA's CPU backend takes twice the time for the batched form."""
    rows = x.reshape(len(x), -1)
    return rows, gather_weight(weight.astype(x.dtype), axes).reshape(rows.shape[1], -1)


matmul.defvjp(_forward, _backward)
