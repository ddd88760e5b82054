"""From a batch's generations and their advantages to minibatches, each a mean over its own prompts."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from poly_epo_jax import set_rl
from poly_epo_jax.batching import PackedBatch, TrainingSequence, pack
from poly_epo_jax.types import GradedGroup


@dataclasses.dataclass(frozen=True)
class MinibatchPacker:
    """Makes minibatches of packed microbatches [num_rows, row_tokens].

    Args:
      num_minibatches: of a batch; each is one optimizer update.
      length_normalization, max_tokens: see `set_rl.token_weights`.
    """

    num_minibatches: int
    row_tokens: int
    num_rows: int
    length_normalization: str
    max_tokens: int

    def __call__(self, graded: Sequence[GradedGroup], advantages: Float[np.ndarray, "P N"]) -> list[list[PackedBatch]]:
        """The minibatches of P groups, in order and as even as can be: where prompts were left out, all are smaller.

        Of fewer groups than minibatches each has its own, and the last minibatches are empty.
        """
        places = np.array_split(np.arange(len(graded)), self.num_minibatches)
        return [self._minibatch([graded[i] for i in own], advantages[own]) for own in places]

    def _minibatch(self, graded: Sequence[GradedGroup], advantages: np.ndarray) -> list[PackedBatch]:
        if not graded:
            return []
        groups = [one.group for one in graded]
        lengths = np.array([[y.loss_mask.sum() for y in group.generations] for group in groups])
        weights = set_rl.token_weights(lengths, self.length_normalization, self.max_tokens)
        sequences = [
            TrainingSequence(group.prompt_ids, y.token_ids, y.logprobs, y.loss_mask, float(advantage), float(weight))
            for group, *rows in zip(groups, advantages, np.asarray(weights), strict=True)
            for y, advantage, weight in zip(group.generations, *rows, strict=True)
        ]
        return pack(sequences, self.row_tokens, self.num_rows)
