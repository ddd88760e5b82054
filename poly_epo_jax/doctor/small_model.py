"""Small model with the attention heads of the run's model. Its programs compile and run in seconds."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.transformer import abstract_model, init_params
from poly_epo_jax.parallel.sharding import param_shardings
from poly_epo_jax.step.packing import TrainingSequence
from poly_epo_jax.types import Params

LAYERS, WIDTH, VOCABULARY = 2, 64, 256


def small_config(model_config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """Returns the configuration of the small model.

    Args:
      model_config: Configuration of the run's model, which determines heads, dtypes and options.
      mesh: Mesh over which the small model can be sharded.

    Returns:
      The configuration with two layers and sizes that the mesh axes divide.
    """
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    return dataclasses.replace(
        model_config,
        vocab_size=VOCABULARY * tensor,
        hidden_size=-(-WIDTH // fsdp) * fsdp,
        mlp_size=2 * WIDTH * tensor,
        num_layers=LAYERS,
        scan_unroll=1,
    )


def random_params(model_config: ModelConfig, mesh: Mesh) -> Params:
    """Creates random weights whose values do not depend on the mesh.

    Args:
      model_config: Configuration of the model.
      mesh: Mesh over which the weights are sharded.
    """
    shardings = param_shardings(abstract_model(model_config), mesh)
    return jax.device_put(jax.device_get(jax.jit(lambda: init_params(model_config))()), shardings)


def random_sequences(count: int, model_config: ModelConfig) -> list[TrainingSequence]:
    """Creates sequences with prompts and responses of 1 to 30 random tokens and random advantages.

    Args:
      count: Number of sequences.
      model_config: Configuration of the model, which determines the vocabulary.
    """
    rng, sequences = np.random.default_rng(0), []
    for _ in range(count):
        prompt, response = rng.integers(1, 31, 2).tolist()
        sequences.append(
            TrainingSequence(
                rng.integers(0, model_config.vocab_size, prompt, np.int32),
                rng.integers(0, model_config.vocab_size, response, np.int32),
                sampler_logprobs=np.zeros(response, np.float32),
                loss_mask=np.ones(response, bool),
                advantage=float(rng.standard_normal()),
                weight=1 / (count * response),
            )
        )
    return sequences
