"""Tests the sharded matmul: values, gradients, and the type in which devices sum gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from poly_epo_jax.model.matmul import matmul
from poly_epo_jax.parallel.sharding import make_mesh

AXES = ("hidden_size", "num_heads", "head_dim")
RNG = np.random.default_rng(0)
X, D_OUT = (jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16) for shape in ((256, 32), (256, 4, 8)))
WEIGHT = jnp.asarray(RNG.standard_normal((32, 4, 8)), jnp.float32)


def gradients(x, weight, d_out):
    out, pullback = jax.vjp(lambda x, weight: matmul(x, weight, AXES), x, weight)
    return out, *pullback(d_out)


def exact(x, weight, d_out):
    """Computes output and gradients in float64 from the bfloat16 inputs."""
    x, w, d = (np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (x, weight, d_out))
    return np.tensordot(x, w, 1), np.tensordot(d, w, ((1, 2), (1, 2))), np.tensordot(x.T, d, 1)


def error(found, expected):
    return np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max()


def test_matmul_without_a_mesh():
    out, d_x, d_weight = jax.jit(gradients)(X, WEIGHT, D_OUT)
    assert (out.dtype, d_x.dtype, d_weight.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    for found, expected, tolerance in zip(
        (out, d_x, d_weight), exact(X, WEIGHT, D_OUT), (4e-3, 4e-3, 1e-6), strict=True
    ):
        assert error(found, expected) < tolerance


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 2)])
def test_gradients_are_summed_in_float32_and_scattered(sizes):
    mesh = make_mesh(*sizes)
    rows, split = PartitionSpec(("data", "fsdp")), PartitionSpec("fsdp", "tensor")
    arguments = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in ((X, rows), (WEIGHT, split), (D_OUT, PartitionSpec(("data", "fsdp"), "tensor")))
    ]
    with jax.set_mesh(mesh):
        out, d_x, d_weight = jax.jit(gradients)(*arguments)
    assert d_weight.sharding.is_equivalent_to(NamedSharding(mesh, split), 3)
    expected = exact(X, WEIGHT, D_OUT)
    assert error(d_weight, expected[2]) < 1e-6
    assert error(out, expected[0]) < 4e-3 and error(d_x, expected[1]) < 4e-3


def test_sums_in_bfloat16_are_detected():
    """Rounding the partial sum of each device, which the test above excludes, exceeds the tolerance."""
    parts = [
        np.tensordot(np.asarray(x.T, np.float32), np.asarray(d, np.float32), 1)
        for x, d in zip(np.split(X, 4), np.split(D_OUT, 4), strict=True)
    ]
    rounded = sum(jnp.asarray(part).astype(jnp.bfloat16) for part in parts)
    assert error(rounded, exact(X, WEIGHT, D_OUT)[2]) > 1e-3
