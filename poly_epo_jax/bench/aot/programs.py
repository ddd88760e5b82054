"""A run's own programs, compiled from shapes without arrays: the update's and, if used, the embedded sampler's."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from poly_epo_jax.config.keys import Config
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.decoding import decoding_weights
from poly_epo_jax.model.qwen3 import abstract_model, param_shapes
from poly_epo_jax.parallel.sharding import host_mesh, param_shardings, replicated
from poly_epo_jax.rollouts.embedded import programs
from poly_epo_jax.rollouts.embedded.slots import TURNOVER, cache_sizes, capacity
from poly_epo_jax.step.packing import microbatch_rows, row_tokens
from poly_epo_jax.step.update import make_update


def compile_update(config: Config, shape: ModelConfig, mesh: Mesh) -> Iterator[tuple[str, Any]]:
    """(name, compiled program) for the log-probabilities, the gradient of a microbatch, and the optimizer."""
    lowered = make_update(config, abstract_model(shape), mesh).lower(
        microbatch_rows(config, mesh.shape), row_tokens(config)
    )
    return ((name, program.compile()) for name, program in lowered.items())


def compile_decoding(config: Config, shape: ModelConfig, mesh: Mesh) -> Iterator[tuple[str, Any]]:
    """(name, compiled program) for laying the weights out for decoding, and for the loop over tokens.

    Both are programs of one host, with the longest cache.
    """
    here, train = host_mesh(mesh), config.train
    requests = train.prompts_per_batch * train.num_generations
    num_slots, _ = capacity(here, config.rollouts.max_concurrent, requests, train.num_generations)
    size = cache_sizes(train.max_prompt_tokens + config.sampling.max_tokens)[-1]
    with jax.set_mesh(here):
        model = abstract_model(shape)
        params = _laid_out(param_shapes(model), param_shardings(model, here))
        push = jax.jit(partial(decoding_weights, shape)).lower(params)
        compiled = push.compile()
        yield "weights for decoding", compiled
        weights = _laid_out(push.out_info, compiled.output_shardings)
        start = programs.start.lower(shape, num_slots, config.sampling.max_tokens, size)
        state = _laid_out(start.out_info, start.compile().output_shardings)
        stop_ids = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=replicated(here))
        sampling = {name: getattr(config.sampling, name) for name in ("temperature", "top_p", "top_k")}
        turnover = max(1, num_slots // TURNOVER)
        yield "decode", programs.decode.lower(shape, weights, state, stop_ids, turnover=turnover, **sampling).compile()


def _laid_out(tree: Any, shardings: Any) -> Any:
    """The tree's shapes, each with its sharding."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)
