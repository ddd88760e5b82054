"""Compares the log-probabilities of a sampler with those of the trainer, within the tolerance of rounding.

The sampler that decodes in the trainer process is checked here, and samplers on servers in servers.py.
"""

import asyncio
import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from poly_epo_jax import set_rl
from poly_epo_jax.config.keys import Config
from poly_epo_jax.doctor.runner import CheckResult, Failed, RunContext
from poly_epo_jax.doctor.small_model import random_params, small_config
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.rounding import exact_matmuls, tolerance_of
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel.mesh import row_shards
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.step.objective import UpdateObjective
from poly_epo_jax.step.packing import PackedBatch, TrainingSequence, pack
from poly_epo_jax.step.update import PolicyUpdate, TrainState
from poly_epo_jax.types import Params, Request, Sampler, Sampling

NUM_PROMPTS, NUM_GENERATIONS, MAX_TOKENS = 4, 2, 24  # MAX_TOKENS limits a prompt, and also a response.


def check_decoding(run: RunContext) -> CheckResult:
    """Checks the run's sampler if it decodes in the trainer process, otherwise the sampler of evaluations.

    The sampler generates with a small model with the run's heads.
    """
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
        message, figures = compare(
            ReferenceScorer(model_config, params, mesh, config.sampling.temperature, 2 * MAX_TOKENS),
            sequences,
            model_config.dtype,
        )
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


class ReferenceScorer:
    """Computes log-probabilities with the trainer's forward pass.

    Args:
      model_config: Configuration of the model.
      params: Weights, sharded over the mesh.
      mesh: Mesh on which the forward pass runs.
      temperature: Sampling temperature.
      max_sequence_tokens: Maximum number of tokens of a prompt and its response together.
    """

    def __init__(
        self, model_config: ModelConfig, params: Params, mesh: Mesh, temperature: float, max_sequence_tokens: int
    ):
        self.model_config = model_config
        self._state, self._mesh, self._temperature = TrainState(params, {}, None, None), mesh, temperature
        self._updates: dict[str, PolicyUpdate] = {}
        step = math.lcm(64, mesh.shape["tensor"])
        self._row_tokens = -(-max_sequence_tokens // step) * step

    def pack(self, sequences: Sequence[TrainingSequence]) -> list[PackedBatch]:
        """Packs sequences into batches of equal shape, so that each program is compiled only once."""
        return pack(sequences, self._row_tokens, row_shards(self._mesh.shape))

    def logprobs(self, batches: Sequence[PackedBatch], dtype: str) -> Float[np.ndarray, " S"]:
        """Computes the log-probabilities of the trained tokens.

        Args:
          batches: Batches from `pack`.
          dtype: Compute dtype of the forward pass.

        Returns:
          Log-probabilities of all trained tokens of all batches, in nats.
        """
        if dtype not in self._updates:
            model = abstract_model(dataclasses.replace(self.model_config, dtype=dtype))
            self._updates[dtype] = PolicyUpdate(
                model, self._mesh, UpdateObjective(set_rl.policy_gradient_loss, self._temperature)
            )
        # Old log-probabilities are not computed for the first minibatch, so these batches form the second one.
        _, filled = self._updates[dtype].with_old_logprobs(self._state, [[], batches])
        return _trained([batch.old_logprobs for batch in filled], batches)


def compare(scorer: ReferenceScorer, sequences: Sequence[TrainingSequence], sampler_dtype: str) -> CheckResult:
    """Compares the sampler's log-probabilities, which are stored in the sequences, with the trainer's.

    Args:
      scorer: Computes the trainer's log-probabilities.
      sequences: Sequences from the sampler.
      sampler_dtype: Compute dtype of the sampler. The tolerance is based on the less precise dtype of sampler and
        trainer.

    Returns:
      A message, and the number of tokens, the mean and largest difference in nats, and the tolerance of the mean.

    Raises:
      Failed: If the mean difference is larger than the tolerance.
    """
    batches, trainer_dtype = scorer.pack(sequences), scorer.model_config.dtype
    trainer = scorer.logprobs(batches, trainer_dtype)
    with exact_matmuls():
        exact = scorer.logprobs(batches, "float32")
    rounding = max(
        float(np.abs(rough - exact).mean())
        for rough in (trainer, *([scorer.logprobs(batches, sampler_dtype)] if sampler_dtype != trainer_dtype else []))
    )
    difference = np.abs(trainer - _trained([batch.sampler_logprobs for batch in batches], batches))
    mean, tolerance = float(difference.mean()), tolerance_of(rounding, float(np.abs(exact).max()))
    if not mean <= tolerance:
        raise Failed(
            f"log-probabilities differ from the trainer's by {mean:.2g} nats on average and {difference.max():.2g} at "
            f"most; the tolerance of the average is {tolerance:.1g}"
        )
    figures = {
        "tokens": len(trainer),
        "mean difference": mean,
        "largest": float(difference.max()),
        "allowed mean": tolerance,
    }
    return f"{len(trainer)} tokens, mean difference {mean:.1e} nats (tolerance {tolerance:.1e})", figures


def _trained(values: Sequence[jax.Array | np.ndarray], batches: Sequence[PackedBatch]) -> Float[np.ndarray, " S"]:
    pairs = zip(values, batches, strict=True)
    return np.concatenate([np.asarray(one)[np.asarray(batch.weights) > 0] for one, batch in pairs])
