"""Compiles the programs of a run's update and embedded sampler from array shapes, without allocating arrays."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from poly_epo_jax.config.keys import Config
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.decoding import decoding_weights
from poly_epo_jax.model.transformer import abstract_model, param_shapes
from poly_epo_jax.parallel.sharding import host_mesh, param_shardings, replicated
from poly_epo_jax.rollouts.embedded import programs
from poly_epo_jax.rollouts.embedded.slots import TURNOVER, cache_sizes, capacity
from poly_epo_jax.step.packing import microbatch_rows, row_tokens
from poly_epo_jax.step.update import make_update


def compile_update(config: Config, model_config: ModelConfig, mesh: Mesh) -> Iterator[tuple[str, Any]]:
    """Compiles the programs of the update.

    Args:
      config: Configuration of the run.
      model_config: Configuration of the model.
      mesh: Mesh of the run.

    Returns:
      An iterator over (name, compiled program): log-probabilities and gradient of a microbatch, and the optimizer.
    """
    lowered = make_update(config, abstract_model(model_config), mesh).lower(
        microbatch_rows(config, mesh.shape), row_tokens(config)
    )
    return ((name, program.compile()) for name, program in lowered.items())


def compile_decoding(config: Config, model_config: ModelConfig, mesh: Mesh) -> Iterator[tuple[str, Any]]:
    """Compiles weight conversion and decoding of the embedded sampler for one process, with the largest cache.

    Args:
      config: Configuration of the run.
      model_config: Configuration of the model.
      mesh: Mesh of the run.

    Yields:
      Pairs (name, compiled program): the conversion of the weights for decoding, and the loop over tokens.
    """
    local_mesh, train = host_mesh(mesh), config.train
    requests = train.prompts_per_batch * train.num_generations
    num_slots, _ = capacity(local_mesh, config.rollouts.max_concurrent, requests, train.num_generations)
    size = cache_sizes(train.max_prompt_tokens + config.sampling.max_tokens)[-1]
    with jax.set_mesh(local_mesh):
        model = abstract_model(model_config)
        params = _with_shardings(param_shapes(model), param_shardings(model, local_mesh))
        push = jax.jit(partial(decoding_weights, model_config)).lower(params)
        compiled = push.compile()
        yield "weights for decoding", compiled
        weights = _with_shardings(push.out_info, compiled.output_shardings)
        start = programs.start.lower(model_config, num_slots, config.sampling.max_tokens, size)
        state = _with_shardings(start.out_info, start.compile().output_shardings)
        stop_ids = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=replicated(local_mesh))
        sampling = {name: getattr(config.sampling, name) for name in ("temperature", "top_p", "top_k")}
        turnover = max(1, num_slots // TURNOVER)
        yield (
            "decode",
            programs.decode.jitted.lower(
                model_config, weights, state, stop_ids, turnover=turnover, **sampling
            ).compile(),
        )


def _with_shardings(tree: Any, shardings: Any) -> Any:
    """Returns the shapes and dtypes of a tree with these shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)
