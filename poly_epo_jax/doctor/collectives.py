"""Compares the gradient on the full mesh with the gradient on one device, for a small model with the run's heads."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from poly_epo_jax.doctor.runner import CheckResult, Failed, RunContext, Skipped
from poly_epo_jax.doctor.small_model import random_params, random_sequences, small_config
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.lora import trained_pattern
from poly_epo_jax.model.rounding import exact_matmuls, tolerance_of
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel.mesh import row_shards
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.step.packing import PackedBatch, pack
from poly_epo_jax.step.update import PolicyUpdate
from poly_epo_jax.types import Params

SEQUENCES, ROW_TOKENS = 4, 64  # Sequences per row shard of the mesh, and tokens per row.


def check_collectives(run: RunContext) -> CheckResult:
    """Checks the collectives of an update by comparing the mesh with one device.

    On the mesh, weights are gathered and gradients are summed across devices. One device does neither. All processes
    take part.
    """
    mesh = run.mesh
    if mesh.size == 1:
        raise Skipped("one device has no collectives")
    model_config, config = small_config(run.model_config, mesh), run.config
    rows = row_shards(mesh.shape)
    row_tokens = -(-ROW_TOKENS // mesh.shape["tensor"]) * mesh.shape["tensor"]
    (batch, *_) = pack(random_sequences(SEQUENCES * rows, model_config), row_tokens, 2 * rows)
    one = make_mesh(1, 1, 1, available=run.local_mesh.devices.reshape(-1)[:1].tolist())

    def gradient(on: Mesh, dtype: str) -> tuple[Params, float]:
        return _gradient(dataclasses.replace(model_config, dtype=dtype), on, batch, trained_pattern(config))

    sharded, sharded_loss = gradient(mesh, model_config.dtype)
    single, loss = gradient(one, model_config.dtype)
    with exact_matmuls():
        exact, exact_loss = gradient(one, "float32")
    error, tolerance = _distance(sharded, single), tolerance_of(_distance(single, exact))
    # The terms of the loss may cancel, so the rounding of the loss is relative to the sum of their absolute values.
    terms = float(np.abs(batch.weights * batch.advantages).sum()) * math.log(model_config.vocab_size)
    loss_error, loss_tolerance = abs(sharded_loss - loss), tolerance_of(abs(loss - exact_loss), terms)
    if not (error <= tolerance and loss_error <= loss_tolerance):
        raise Failed(
            f"on the mesh, the gradient differs from one device's by {error:.1e} of its norm (tolerance "
            f"{tolerance:.1e}) and the loss by {loss_error:.1e} (tolerance {loss_tolerance:.1e}); on GPUs, inspect the "
            "output of NCCL_DEBUG=INFO and nvidia-smi topo -m, and try mesh.tensor=1"
        )
    return (
        f"{mesh.size} devices: gradient within {error:.1e} of one device's (tolerance {tolerance:.1e})",
        {"gradient error": error, "allowed": tolerance, "loss": loss, "loss error": loss_error},
    )


def _gradient(model_config: ModelConfig, mesh: Mesh, batch: PackedBatch, trainable: str) -> tuple[Params, float]:
    """Returns (gradient on the mesh, loss)."""
    update = PolicyUpdate(abstract_model(model_config), mesh, trainable=trainable)
    gradients, (metrics,) = update.gradient(update.init(random_params(model_config, mesh)), [batch])
    return gradients, float(metrics["loss"])


def _distance(found: Params, expected: Params) -> float:
    """Returns the norm of the difference relative to the norm of `expected`, which is on one device of each process."""
    # Every process holds the complete arrays, and places the shards of its devices.
    expected = jax.tree.map(
        lambda like, x: jax.make_array_from_callback(x.shape, like.sharding, x.__getitem__),
        found,
        jax.device_get(expected),
    )
    return float(_relative_error(found, expected))


@jax.jit
def _relative_error(found: Params, expected: Params) -> jax.Array:
    return optax.global_norm(jax.tree.map(jnp.subtract, found, expected)) / optax.global_norm(expected)
