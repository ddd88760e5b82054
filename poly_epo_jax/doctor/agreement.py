"""Compares the log-probabilities of a sampler with those of the trainer, within the tolerance of rounding."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from poly_epo_jax import set_rl
from poly_epo_jax.doctor.runner import CheckResult, Failed
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.rounding import exact_matmuls, tolerance_of
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel.mesh import row_shards
from poly_epo_jax.step.objective import UpdateObjective
from poly_epo_jax.step.packing import PackedBatch, TrainingSequence, pack
from poly_epo_jax.step.update import PolicyUpdate, TrainState
from poly_epo_jax.types import Params


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
            objective = UpdateObjective(set_rl.policy_gradient_loss, self._temperature)
            self._updates[dtype] = PolicyUpdate(model, self._mesh, objective)
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
    batches = scorer.pack(sequences)
    trainer_dtype = scorer.model_config.dtype
    trainer = scorer.logprobs(batches, trainer_dtype)
    with exact_matmuls():
        exact = scorer.logprobs(batches, "float32")
    rounding = max(
        float(np.abs(rough - exact).mean())
        for rough in (trainer, *([scorer.logprobs(batches, sampler_dtype)] if sampler_dtype != trainer_dtype else []))
    )
    sampler = _trained([batch.sampler_logprobs for batch in batches], batches)
    difference = np.abs(trainer - sampler)
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
