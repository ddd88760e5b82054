"""Packs the generations of a batch and their advantages into minibatches.

The loss of a minibatch is a mean over the prompts or, with `length_normalization="token"`, over the tokens of this
minibatch. Its weights are computed before packing, so the mean does not depend on microbatches, rows or devices.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from poly_epo_jax import set_rl
from poly_epo_jax.step.packing import PackedBatch, TrainingSequence, ZeroAdvantageBatch
from poly_epo_jax.step.partial_groups import padded
from poly_epo_jax.types import GradedGroup

GRADIENT_COST = 3
"""Cost of a forward and backward pass, in forward passes."""


@dataclasses.dataclass(frozen=True)
class MinibatchPacker:
    """Splits a batch into minibatches of packed microbatches.

    Attributes:
      num_minibatches: Number of minibatches per batch. Each minibatch is one optimizer update.
      pack: Packs sequences into microbatches, see `packing.make_pack`.
      length_normalization: Divisor of the sum over a response's tokens. "own" divides by the length of the response, so
        that all responses have the same weight. "max" divides by `max_tokens`, so that all tokens have the same weight.
        "token" divides by the mean length of the minibatch's responses, so that the loss is a mean over its tokens.
      max_tokens: Maximum number of response tokens.
      max_sequence_tokens: Maximum number of tokens of a prompt and its response. If 0, only the row length limits it.
      skip_zero_advantage: Whether sequences with advantage 0 contribute nothing to the gradient, so that their
        backward pass may be skipped (`ZeroAdvantageBatch`).
    """

    num_minibatches: int
    pack: Callable[[Sequence[TrainingSequence]], list[PackedBatch]]
    length_normalization: str
    max_tokens: int
    max_sequence_tokens: int = 0
    skip_zero_advantage: bool = False

    def __call__(self, graded: Sequence[GradedGroup], advantages: Float[np.ndarray, "P N"]) -> list[list[PackedBatch]]:
        """Splits P groups into minibatches, in order and as evenly as possible, and packs each minibatch.

        Args:
          graded: Graded groups. There may be fewer groups than prompts in a batch, if the judge failed on some.
          advantages: Advantages [P, N] of their generations, see `group_advantages`. Generations whose advantage is NaN
            are left out, see `Truncation`: they count in the means over prompts and generations, but their tokens do
            not count. The mean over the generations of a group is over its M generations.

        Returns:
          The microbatches of each minibatch. With fewer groups than minibatches, each group forms its own minibatch,
          and the last minibatches are empty. Minibatches whose generations are all left out are also empty.

        Raises:
          ValueError: If a sequence is longer than `max_sequence_tokens` or a row.
        """
        return [
            self._minibatch([graded[i] for i in own.tolist()], advantages[own])
            for own in np.array_split(np.arange(len(graded)), self.num_minibatches)
        ]

    def _minibatch(self, graded: Sequence[GradedGroup], advantages: np.ndarray) -> list[PackedBatch]:
        if not graded:
            return []
        groups = [graded_group.group for graded_group in graded]
        rows = [[y.loss_mask.sum() for y in group.generations] for group in groups]
        lengths = padded(rows, advantages.shape[1]).astype(int)
        lengths[np.isnan(advantages)] = 0
        weights = set_rl.token_weights(
            lengths, self.length_normalization, self.max_tokens, [len(group.generations) for group in groups]
        )
        sequences = [
            TrainingSequence(group.prompt_ids, y.token_ids, y.logprobs, y.loss_mask, float(advantage), float(weight))
            for group, *rows in zip(groups, advantages, np.asarray(weights), strict=True)
            for y, advantage, weight in zip(group.generations, *rows, strict=False)
            if not np.isnan(advantage)
        ]
        found = max((len(s.prompt_ids) + len(s.response_ids) for s in sequences), default=0)
        if self.max_sequence_tokens and found > self.max_sequence_tokens:
            raise ValueError(
                f"A sequence has {found} tokens, but train.max_prompt_tokens + sampling.max_tokens = "
                f"{self.max_sequence_tokens} limits the length that attention supports; raise one of them."
            )
        packed = self.pack(sequences)
        if not self.skip_zero_advantage:
            return packed
        trained = self.pack([s for s in sequences if s.advantage])
        zero_advantage = [ZeroAdvantageBatch(*batch) for batch in self.pack([s for s in sequences if not s.advantage])]
        # With few sequences, packing them separately may add more padding than the skipped backward passes save.
        saves_time = GRADIENT_COST * (_num_tokens(packed) - _num_tokens(trained)) > _num_tokens(zero_advantage)
        return [*trained, *zero_advantage] if saves_time else packed


def _num_tokens(batches: Sequence[PackedBatch]) -> int:
    """Returns the number of tokens, including padding."""
    return sum(batch.tokens.size for batch in batches)
