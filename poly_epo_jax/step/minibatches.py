"""Turns a batch's generations and their advantages into minibatches, each a mean over its own prompts."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from poly_epo_jax import set_rl
from poly_epo_jax.step.packing import PackedBatch, SilentBatch, TrainingSequence
from poly_epo_jax.types import GradedGroup

GRADIENT_COST = 3
"""The cost of a token's gradient, in forward passes."""


@dataclasses.dataclass(frozen=True)
class MinibatchPacker:
    """Makes minibatches of packed microbatches.

    Args:
      num_minibatches: minibatches per batch; each is one optimizer update.
      pack: see step/packing.py.
      length_normalization, max_tokens: see `set_rl.token_weights`.
      longest_sequence: the most tokens that prompt and response have together; 0: as many as a row.
      skip_silent: whether sequences with advantage 0 add nothing to the gradient, so they may be in a `SilentBatch`.
    """

    num_minibatches: int
    pack: Callable[[Sequence[TrainingSequence]], list[PackedBatch]]
    length_normalization: str
    max_tokens: int
    longest_sequence: int = 0
    skip_silent: bool = False

    def __call__(self, graded: Sequence[GradedGroup], advantages: Float[np.ndarray, "P N"]) -> list[list[PackedBatch]]:
        """Splits P groups into minibatches, in order and as evenly as possible: if prompts were left out, all shrink.

        With fewer groups than minibatches, each group has its own minibatch, and the last minibatches are empty.
        """
        places = np.array_split(np.arange(len(graded)), self.num_minibatches)
        return [self._minibatch([graded[i] for i in own.tolist()], advantages[own]) for own in places]

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
        found = max(len(s.prompt_ids) + len(s.response_ids) for s in sequences)
        if self.longest_sequence and found > self.longest_sequence:
            raise ValueError(
                f"A sequence has {found} tokens, but train.max_prompt_tokens + sampling.max_tokens = "
                f"{self.longest_sequence} bounds what attention looks at; raise one of them."
            )
        whole = self.pack(sequences)
        if not self.skip_silent:
            return whole
        trained = self.pack([s for s in sequences if s.advantage])
        silent = [SilentBatch(*batch) for batch in self.pack([s for s in sequences if not s.advantage])]
        # With few sequences, the second packing may add more padding than the skipped gradients save.
        saves = GRADIENT_COST * (_num_tokens(whole) - _num_tokens(trained)) > _num_tokens(silent)
        return [*trained, *silent] if saves else whole


def _num_tokens(batches: Sequence[PackedBatch]) -> int:
    """Including padding."""
    return sum(batch.tokens.size for batch in batches)
