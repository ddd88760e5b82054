"""Compares decoding inside the trainer with the trainer's forward pass, on a small model with the run's heads."""

import asyncio
import dataclasses

import numpy as np

from poly_epo_jax.config.keys import Config
from poly_epo_jax.doctor.agreement import Trainer, compare
from poly_epo_jax.doctor.examine import Failed, Seen, Subject
from poly_epo_jax.doctor.small_model import random_params, small_shape
from poly_epo_jax.model.qwen3 import abstract_model
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.step.packing import TrainingSequence
from poly_epo_jax.types import Params, Request, Sampler, Sampling

PROMPTS, GENERATIONS, LONGEST = 4, 2, 24


def check_decoding(subject: Subject) -> Seen:
    """Checks the run's sampler if it decodes in the trainer, else the sampler that evaluations decode with."""
    config, mesh = subject.config, subject.here
    shape = small_shape(subject.shape, mesh)
    params = random_params(shape, mesh)
    name = "embedded" if SAMPLERS[config.rollouts.name].needs_urls else config.rollouts.name
    options = config.rollouts.options if name == config.rollouts.name else {}
    sampler = SAMPLERS[name].open(abstract_model(shape), mesh, (0,), _small(config), **options)
    try:
        sequences = asyncio.run(_generated(sampler, params, shape.vocab_size, config.sampling.temperature))
    finally:
        sampler.close()
    try:
        trainer = Trainer(shape, params, mesh, config.sampling.temperature, 2 * LONGEST)
        seen, figures = compare(trainer, sequences, shape.dtype)
    except Failed as error:
        raise Failed(f"{name}: {error}; see whether the kernel passed, and report it with the device's name") from None
    return f"{name}: {seen}", figures


def _small(config: Config) -> Config:
    """The configuration, reduced to the sizes that are generated here."""
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, num_generations=GENERATIONS, max_prompt_tokens=LONGEST),
        sampling=dataclasses.replace(config.sampling, max_tokens=LONGEST),
        rollouts=dataclasses.replace(config.rollouts, max_concurrent=PROMPTS * GENERATIONS),
    )


async def _generated(sampler: Sampler, params: Params, vocab_size: int, temperature: float) -> list[TrainingSequence]:
    """The sampler's generations for prompts of random tokens."""
    rng = np.random.default_rng(0)
    lengths = np.linspace(1, LONGEST, PROMPTS).astype(int).tolist()
    prompts = [rng.integers(1, vocab_size, length, np.int32) for length in lengths]
    seeds = np.arange(GENERATIONS, dtype=np.uint32)
    requests = [Request(str(place), prompt, seeds, LONGEST) for place, prompt in enumerate(prompts)]
    await sampler.push_weights(params, 0)
    return [
        TrainingSequence(prompts[one.request], one.token_ids, one.logprobs, np.ones(len(one.token_ids), bool), 1.0, 1.0)
        async for one in sampler.sample(requests, Sampling(LONGEST, temperature))
    ]
