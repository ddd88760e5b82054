"""A model with the heads of the run's model, but narrow and shallow, whose programs compile and run in seconds."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.qwen3 import abstract_model, first_params
from poly_epo_jax.parallel.sharding import param_shardings
from poly_epo_jax.step.packing import TrainingSequence
from poly_epo_jax.types import Params

LAYERS, WIDTH, VOCABULARY = 2, 64, 256


def small_shape(shape: ModelConfig, mesh: Mesh) -> ModelConfig:
    """Two layers with the heads, types and switches of `shape`, in sizes that the mesh can split."""
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    return dataclasses.replace(
        shape,
        vocab_size=VOCABULARY * tensor,
        hidden_size=-(-WIDTH // fsdp) * fsdp,
        mlp_size=2 * WIDTH * tensor,
        num_layers=LAYERS,
        scan_unroll=1,
    )


def random_params(shape: ModelConfig, mesh: Mesh) -> Params:
    """Random weights of such a model, the same on every mesh."""
    shardings = param_shardings(abstract_model(shape), mesh)
    params = jax.jit(lambda: first_params(shape))()
    return jax.device_put(jax.device_get(params), shardings)


def random_sequences(count: int, shape: ModelConfig) -> list[TrainingSequence]:
    """Prompts and responses of 1 to 30 random tokens, with random advantages."""
    rng, sequences = np.random.default_rng(0), []
    for _ in range(count):
        prompt, response = rng.integers(1, 31, 2).tolist()
        sequences.append(
            TrainingSequence(
                rng.integers(0, shape.vocab_size, prompt, np.int32),
                rng.integers(0, shape.vocab_size, response, np.int32),
                sampler_logprobs=np.zeros(response, np.float32),
                loss_mask=np.ones(response, bool),
                advantage=float(rng.standard_normal()),
                weight=1 / (count * response),
            )
        )
    return sequences
