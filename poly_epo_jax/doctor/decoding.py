"""Compares decoding in the trainer process with the trainer's forward pass, on a small model with the run's heads."""

import asyncio
import dataclasses

import numpy as np

from poly_epo_jax.config.keys import Config
from poly_epo_jax.doctor.agreement import ReferenceScorer, compare
from poly_epo_jax.doctor.runner import CheckResult, Failed, RunContext
from poly_epo_jax.doctor.small_model import random_params, small_config
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.step.packing import TrainingSequence
from poly_epo_jax.types import Params, Request, Sampler, Sampling

NUM_PROMPTS, NUM_GENERATIONS, MAX_TOKENS = 4, 2, 24  # MAX_TOKENS limits a prompt, and also a response.


def check_decoding(run: RunContext) -> CheckResult:
    """Checks the run's sampler if it decodes in the trainer process, otherwise the sampler of evaluations."""
    config, mesh = run.config, run.local_mesh
    model_config = small_config(run.model_config, mesh)
    params = random_params(model_config, mesh)
    name = "embedded" if SAMPLERS[config.rollouts.name].needs_urls else config.rollouts.name
    options = config.rollouts.options if name == config.rollouts.name else {}
    sampler = SAMPLERS[name].open(abstract_model(model_config), mesh, (0,), _small(config), **options)
    try:
        sequences = asyncio.run(_generate(sampler, params, model_config.vocab_size, config.sampling.temperature))
    finally:
        sampler.close()
    try:
        scorer = ReferenceScorer(model_config, params, mesh, config.sampling.temperature, 2 * MAX_TOKENS)
        message, figures = compare(scorer, sequences, model_config.dtype)
    except Failed as error:
        raise Failed(
            f"{name}: {error}; check whether the kernel passed, and report the problem with the name of the device"
        ) from None
    return f"{name}: {message}", figures


def _small(config: Config) -> Config:
    """Returns the configuration with the sizes of this check."""
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, num_generations=NUM_GENERATIONS, max_prompt_tokens=MAX_TOKENS),
        sampling=dataclasses.replace(config.sampling, max_tokens=MAX_TOKENS),
        rollouts=dataclasses.replace(config.rollouts, max_concurrent=NUM_PROMPTS * NUM_GENERATIONS),
    )


async def _generate(sampler: Sampler, params: Params, vocab_size: int, temperature: float) -> list[TrainingSequence]:
    """Generates responses to prompts of random tokens with the sampler."""
    rng = np.random.default_rng(0)
    lengths = np.linspace(1, MAX_TOKENS, NUM_PROMPTS).astype(int).tolist()
    prompts = [rng.integers(1, vocab_size, length, np.int32) for length in lengths]
    seeds = np.arange(NUM_GENERATIONS, dtype=np.uint32)
    requests = [Request(str(index), prompt, seeds, MAX_TOKENS) for index, prompt in enumerate(prompts)]
    await sampler.push_weights(params, 0)
    return [
        TrainingSequence(prompts[one.request], one.token_ids, one.logprobs, np.ones(len(one.token_ids), bool), 1.0, 1.0)
        async for one in sampler.sample(requests, Sampling(MAX_TOKENS, temperature))
    ]
