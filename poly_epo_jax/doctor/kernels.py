"""Compares the run's attention kernel with the plain form: values and gradients, on the run's devices."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from poly_epo_jax.doctor.finding import Failed, Seen, Subject
from poly_epo_jax.doctor.rounding import allowed, exactly
from poly_epo_jax.model.attention import packed_attention
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.sharding import row_sharding

LENGTHS = (200, 1, 127, 130, 90)  # of a row's sequences: shorter and longer than a block, and spanning several
PADDING = 40


def check_kernel(subject: Subject) -> Seen:
    """Runs the kernel on packed rows, one row for each group of `tensor` devices."""
    shape = subject.shape
    errors = kernel_errors(shape, subject.here)
    for name, (error, most) in errors.items():
        if not error <= most:
            raise Failed(
                f"model.attention={shape.attention} is wrong by {error:.1e} of the largest number in {name}, where "
                f"rounding to {shape.dtype} explains {most:.1e}; set --config.model.attention=blockwise, which is "
                "slower, and report the kernel"
            )
    figures = {f"error of {name}": error for name, (error, _) in errors.items()}
    worst, most = max(errors.values())
    return f"{shape.attention}: within {worst:.1e} of the plain form, rounding allows {most:.1e}", figures


def kernel_errors(shape: ModelConfig, mesh: Mesh) -> Mapping[str, tuple[float, float]]:
    """For the output and each gradient: the largest error relative to its largest number, and the most allowed."""
    rng, rows = np.random.default_rng(0), mesh.shape["data"] * mesh.shape["fsdp"]
    segment_ids = packed_ids(rows)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    draws = [rng.standard_normal((*segment_ids.shape, count, shape.head_dim), np.float32) for count in heads]
    draws[-1] *= segment_ids[:, :, None, None] > 0  # what padding attends to is irrelevant
    with jax.set_mesh(mesh):
        put = functools.partial(jax.device_put, device=row_sharding(mesh))
        ids = put(segment_ids)
        inputs = [put(draw.astype(shape.dtype)) for draw in draws]
        with exactly():
            exact = _passes(plain_attention, [x.astype(jnp.float32) for x in inputs], ids)
        rough = _passes(plain_attention, inputs, ids)
        kernel = _passes(functools.partial(packed_attention, implementation=shape.attention), inputs, ids)
        rounding, found = jax.device_get((_errors(rough, exact, ids), _errors(kernel, exact, ids)))
    return {name: (float(found[name]), allowed(float(rounding[name]))) for name in found}


def packed_ids(rows: int) -> Int[np.ndarray, "B T"]:
    """The segment ids of each row: sequences of LENGTHS, and padding."""
    ids = np.repeat([*range(1, len(LENGTHS) + 1), 0], [*LENGTHS, PADDING]).astype(np.int32)
    return np.tile(ids, (rows, 1))


def plain_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    segment_ids: Int[Array, "B T"],
) -> Float[Array, "B T H D"]:
    """`packed_attention` by its definition, with the whole [T, T] scores, for a few hundred tokens."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(_visible(segment_ids)[:, None], scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _visible(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    place = jnp.arange(segment_ids.shape[1])
    return (segment_ids[:, :, None] == segment_ids[:, None]) & (place[:, None] >= place[None])[None]


def _passes(attend, inputs, segment_ids):
    """The output, and the three gradients of a random linear loss."""

    @jax.jit
    def both(q, k, v, cotangent):
        out, pullback = jax.vjp(lambda *qkv: attend(*qkv, segment_ids), q, k, v)
        return dict(zip(("output", "dq", "dk", "dv"), (out, *pullback(cotangent)), strict=True))

    return both(*inputs)


@jax.jit
def _errors(found, exact, segment_ids):
    """The largest error on real tokens, by name, relative to the largest exact number; infinite if it is NaN."""
    real = (segment_ids > 0)[:, :, None, None]

    def error(x, y):
        worst = jnp.max(jnp.where(real, jnp.abs(x.astype(jnp.float32) - y), 0.0)) / jnp.max(jnp.abs(y) * real)
        return jnp.where(jnp.isfinite(worst), worst, jnp.inf)

    return jax.tree.map(error, found, exact)
