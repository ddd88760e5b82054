"""Compares the gradient on the whole mesh with that on one device, for a small model with the run's heads."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from poly_epo_jax.doctor.examine import Failed, Missing, Seen, Subject
from poly_epo_jax.doctor.small_model import random_params, random_sequences, small_shape
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.lora import trained_pattern
from poly_epo_jax.model.qwen3 import abstract_model
from poly_epo_jax.model.rounding import allowed, exactly
from poly_epo_jax.parallel.mesh import AXES
from poly_epo_jax.step.packing import PackedBatch, pack
from poly_epo_jax.step.update import PolicyUpdate
from poly_epo_jax.types import Params

SEQUENCES, ROW_TOKENS = 4, 64  # sequences per row shard of the mesh; tokens per row


def check_collectives(subject: Subject) -> Seen:
    """The mesh gathers weights and sums gradients across devices; one device does neither. All hosts take part."""
    mesh = subject.mesh
    if mesh.size == 1:
        raise Missing("one device has no collectives")
    shape, config = small_shape(subject.shape, mesh), subject.config
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    row_tokens = -(-ROW_TOKENS // mesh.shape["tensor"]) * mesh.shape["tensor"]
    (batch, *_) = pack(random_sequences(SEQUENCES * rows, shape), row_tokens, 2 * rows)
    one = Mesh(subject.here.devices.reshape(-1)[:1].reshape(1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)

    def gradient(where: Mesh, dtype: str) -> tuple[Params, float]:
        return _gradient(dataclasses.replace(shape, dtype=dtype), where, batch, trained_pattern(config))

    split, split_loss = gradient(mesh, shape.dtype)
    alone, loss = gradient(one, shape.dtype)
    with exactly():
        exact, exact_loss = gradient(one, "float32")
    error, most = _distance(split, alone), allowed(_distance(alone, exact))
    # The terms of the loss may cancel, so its rounding is relative to what their sizes add up to.
    terms = float(np.abs(batch.weights * batch.advantages).sum()) * math.log(shape.vocab_size)
    loss_error, most_loss = abs(split_loss - loss), allowed(abs(loss - exact_loss), terms)
    if not (error <= most and loss_error <= most_loss):
        raise Failed(
            f"on the mesh the gradient differs from one device's by {error:.1e} of its norm, where rounding explains "
            f"{most:.1e}, and the loss by {loss_error:.1e} of {most_loss:.1e}; on GPUs look at NCCL_DEBUG=INFO and "
            "nvidia-smi topo -m, and try a mesh with mesh.tensor=1"
        )
    figures = {"gradient error": error, "allowed": most, "loss": loss, "loss error": loss_error}
    return f"{mesh.size} devices: gradient within {error:.1e} of one device's, rounding allows {most:.1e}", figures


def _gradient(shape: ModelConfig, mesh: Mesh, batch: PackedBatch, trainable: str) -> tuple[Params, float]:
    """(gradient on the mesh, loss)."""
    update = PolicyUpdate(abstract_model(shape), mesh, trainable=trainable)
    state = update.init(random_params(shape, mesh))
    gradients, (metrics,) = update.gradient(state, [batch])
    return gradients, float(metrics["loss"])


def _distance(found: Params, expected: Params) -> float:
    """The norm of the difference, relative to the norm of `expected`, which lies on one device of each host."""
    expected = jax.tree.map(lambda like, x: _laid_out(jax.device_get(x), like.sharding), found, expected)
    return float(_relative(found, expected))


def _laid_out(values: np.ndarray, sharding: Any) -> jax.Array:
    """The array under this sharding: every host has all of it, and takes its own devices' part."""
    return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)


@jax.jit
def _relative(found: Params, expected: Params) -> jax.Array:
    def norm(tree: Params) -> jax.Array:
        return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))

    return norm(jax.tree.map(jnp.subtract, found, expected)) / norm(expected)
