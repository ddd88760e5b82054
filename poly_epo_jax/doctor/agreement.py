"""Whether a sampler and the trainer give the same tokens the same probabilities, as far as rounding allows."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from poly_epo_jax import set_rl
from poly_epo_jax.doctor.examine import Failed, Seen
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.qwen3 import abstract_model
from poly_epo_jax.model.rounding import allowed, exactly
from poly_epo_jax.step.objective import Objective
from poly_epo_jax.step.packing import PackedBatch, TrainingSequence, pack
from poly_epo_jax.step.update import PolicyUpdate, TrainState
from poly_epo_jax.types import Params


class Trainer:
    """Computes the trainer's log-probabilities.

    Args:
      params: laid out on the mesh.
      temperature: the sampling temperature.
      longest: the most tokens of a prompt with its response.
    """

    def __init__(self, shape: ModelConfig, params: Params, mesh: Mesh, temperature: float, longest: int):
        self.shape = shape
        self._state, self._mesh, self._temperature = TrainState(params, {}, None, None), mesh, temperature
        self._updates: dict[str, PolicyUpdate] = {}
        step = math.lcm(64, mesh.shape["tensor"])
        self._row_tokens = -(-longest // step) * step

    def pack(self, sequences: Sequence[TrainingSequence]) -> list[PackedBatch]:
        """Packs the sequences into batches of one shape, so that each program is compiled once."""
        return pack(sequences, self._row_tokens, self._mesh.shape["data"] * self._mesh.shape["fsdp"])

    def logprobs(self, batches: Sequence[PackedBatch], dtype: str) -> Float[np.ndarray, " S"]:
        """The log-probabilities of the trained tokens, computed in `dtype`."""
        if dtype not in self._updates:
            model = abstract_model(dataclasses.replace(self.shape, dtype=dtype))
            objective = Objective(set_rl.policy_gradient_loss, self._temperature)
            self._updates[dtype] = PolicyUpdate(model, self._mesh, objective)
        # The first minibatch needs no old log-probabilities, so these batches are the second.
        _, filled = self._updates[dtype].with_old_logprobs(self._state, [[], batches])
        return _trained([batch.old_logprobs for batch in filled], batches)


def compare(trainer: Trainer, sequences: Sequence[TrainingSequence], sampler_dtype: str) -> Seen:
    """The mean difference between the trainer's log-probabilities and the sampler's, which the sequences hold.

    Args:
      sampler_dtype: the type that the sampler computes in; the rounding of the coarser of the two types is allowed.

    Raises:
      Failed: the difference is more than rounding explains.
    """
    batches = trainer.pack(sequences)
    own_dtype = trainer.shape.dtype
    own = trainer.logprobs(batches, own_dtype)
    with exactly():
        exact = trainer.logprobs(batches, "float32")
    rounding = max(
        float(np.abs(rough - exact).mean())
        for rough in (own, *([trainer.logprobs(batches, sampler_dtype)] if sampler_dtype != own_dtype else []))
    )
    sampler = _trained([batch.sampler_logprobs for batch in batches], batches)
    difference = np.abs(own - sampler)
    mean, most = float(difference.mean()), allowed(rounding, float(np.abs(exact).max()))
    if not mean <= most:
        raise Failed(
            f"log-probabilities differ from the trainer's by {mean:.2g} nats in the mean and {difference.max():.2g} at "
            f"most, where rounding explains {most:.1g}"
        )
    figures = {"tokens": len(own), "mean difference": mean, "largest": float(difference.max()), "allowed mean": most}
    return f"{len(own)} tokens, log-probabilities within {mean:.1e} nats, rounding allows {most:.1e}", figures


def _trained(values: Sequence[jax.Array | np.ndarray], batches: Sequence[PackedBatch]) -> Float[np.ndarray, " S"]:
    pairs = zip(values, batches, strict=True)
    return np.concatenate([np.asarray(one)[np.asarray(batch.weights) > 0] for one, batch in pairs])
