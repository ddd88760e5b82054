"""Rollouts with the embedded sampler and the tiny policy of `fakes`."""

import asyncio

from fakes import TINY_ALPHABET, TINY_MODEL, ByLetter, collect, on_mesh, tiny_params

from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.rollouts.embedded.sampler import EmbeddedSampler
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.types import Sampling

STOP_IDS = (1, 14, 26)
MAX_PROMPT, MAX_TOKENS = 10, 12
MESH = make_mesh(1, 1, 1)
TOKENIZER = build_character_tokenizer(TINY_ALPHABET)


def make_rollouts(seed=0, max_concurrent=64, task=None, model=TINY_MODEL, mesh=MESH):
    """Returns rollouts with the weights `tiny_params(seed, model)`, version 0."""
    sampler = EmbeddedSampler(model, mesh, STOP_IDS, MAX_PROMPT, max_concurrent)
    asyncio.run(sampler.push_weights(on_mesh(tiny_params(seed, model), mesh, model), 0))
    return Rollouts(sampler, TOKENIZER, task or ByLetter(), MAX_PROMPT)


def generate(rollouts, problems, num_generations, max_tokens=MAX_TOKENS, **sampling):
    """Returns the groups of all problems, in their order."""
    return collect(rollouts, problems, num_generations, Sampling(max_tokens, **sampling))


def token_ids(groups):
    """Returns the token ids of each generation of each group."""
    return [[y.token_ids.tolist() for y in group.generations] for group in groups]
