"""Sequences of the benchmarked training step: random tokens with response lengths typical of reasoning."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int

from poly_epo_jax.config.keys import Config
from poly_epo_jax.step.packing import PackedBatch, TrainingSequence, make_pack

# Mean response length as a fraction of sampling.max_tokens, and standard deviation of the logarithm of the length,
# before responses are truncated to sampling.max_tokens.
MEAN_LENGTH, SIGMA = 0.4, 0.6


@dataclasses.dataclass(frozen=True)
class Workload:
    """The S = P N sequences of one step: N generations for each of P prompts.

    Attributes:
      prompt_lengths, response_lengths: Lengths of the sequences, in tokens.
      minibatches: Packed microbatches of the sequences, by minibatch.
      has_reference: Whether the objective has a KL term, which reads log-probabilities of the reference policy.
    """

    prompt_lengths: Int[np.ndarray, " S"]
    response_lengths: Int[np.ndarray, " S"]
    minibatches: list[list[PackedBatch]]
    has_reference: bool

    @property
    def runs(self) -> dict[str, int]:
        """Number of executions of each program of the update in one step.

        The old log-probabilities of the first minibatch are not computed; see `PolicyUpdate.with_old_logprobs`.
        """
        microbatches = list(map(len, self.minibatches))
        return {
            "logprobs": sum(microbatches[1:]) + self.has_reference * sum(microbatches),
            "gradient": sum(microbatches),
            "optimizer": len(microbatches),
        }

    @property
    def pad_share(self) -> float:
        """Fraction of padding among the tokens of the update."""
        return float(np.mean([batch.segment_ids == 0 for minibatch in self.minibatches for batch in minibatch]))


def make_workload(config: Config, vocab_size: int, mesh_shape: Mapping[str, int]) -> Workload:
    """Creates and packs the random sequences of one training step.

    Prompts have the maximum length. Response lengths are log-normal, as is typical of reasoning.

    Args:
      config: Configuration of the run.
      vocab_size: Size of the vocabulary.
      mesh_shape: Sizes of the mesh axes, which determine the number of rows of a microbatch.

    Returns:
      The packed sequences.
    """
    train, rng = config.train, np.random.default_rng(0)
    count = train.prompts_per_batch * train.num_generations
    mean = np.log(MEAN_LENGTH * config.sampling.max_tokens) - SIGMA**2 / 2
    responses = np.clip(np.rint(rng.lognormal(mean, SIGMA, count)), 1, config.sampling.max_tokens).astype(int)
    prompts = np.full(count, train.max_prompt_tokens)
    sequences = [
        TrainingSequence(
            rng.integers(0, vocab_size, prompt).astype(np.int32),
            rng.integers(0, vocab_size, response).astype(np.int32),
            np.zeros(response, np.float32),
            np.ones(response, bool),
            float(rng.standard_normal()),
            1 / (count * config.sampling.max_tokens),
        )
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    size, pack = train.prompts_per_minibatch * train.num_generations, make_pack(config, mesh_shape)
    return Workload(
        prompts,
        responses,
        [pack(sequences[start : start + size]) for start in range(0, count, size)],
        has_reference=bool(config.algo.kl_coef),
    )
