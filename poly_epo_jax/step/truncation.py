"""Leaves out or penalizes truncated responses after the estimator, as `algo.truncated` selects.

Rewards and clusters of truncated responses never change, so they take part in the baselines and sets of their group.
A penalty in the reward would make the mean reward of a set negative, and the polychromic objective, mean reward times
diversity, would then prefer sets of equal responses.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from poly_epo_jax.config.keys import Config
from poly_epo_jax.step.partial_groups import padded
from poly_epo_jax.types import GradedGroup, Metrics

DEFAULT_FRACTION = 0.2
"""Fraction of `sampling.max_tokens` over which the penalty grows by default, as in DAPO: 4,096 of 20,480 tokens."""


@dataclasses.dataclass(frozen=True)
class Truncation:
    """The treatment of truncated responses: responses that end by the token limit, regardless of their cluster.

    Attributes:
      mode: "train" changes nothing, "mask" leaves truncated responses out of the update, and "penalize" subtracts the
        soft overlong penalty of DAPO (Yu et al., arXiv 2503.14476), centered over the group.
      max_tokens: Maximum number L of tokens of a response.
      overlong_tokens: Number C of tokens over which the penalty grows. A response of l tokens has the penalty
        c = min(max((l - (L - C)) / C, 0), 1), and a truncated response has c = 1.
      coef: Coefficient of the penalty.
    """

    mode: str = "train"
    max_tokens: int = 1
    overlong_tokens: int = 1
    coef: float = 0.0

    def __call__(
        self, graded: Sequence[GradedGroup], advantages: Float[np.ndarray, "P N"]
    ) -> tuple[Float[np.ndarray, "P N"], Metrics]:
        """Applies the treatment to the advantages of P groups with N generations each.

        Args:
          graded: Graded groups.
          advantages: Advantages [P, N] from the estimator, see `group_advantages`.

        Returns:
          A tuple of the advantages to train with, which are NaN for responses that are left out, and metrics.
        """
        if self.mode == "train":
            return advantages, {}
        generations, num_generations = [group.group.generations for group in graded], advantages.shape[1]
        is_truncated = padded([[y.finish_reason == "length" for y in own] for own in generations], num_generations) > 0
        if self.mode == "mask":
            return np.where(is_truncated, np.nan, advantages), {"response/masked": float(is_truncated.sum())}
        lengths = padded([[len(y.token_ids) for y in own] for own in generations], num_generations)
        excess = (lengths - (self.max_tokens - self.overlong_tokens)) / self.overlong_tokens
        penalties = self.coef * np.where(is_truncated, 1.0, excess.clip(0, 1))
        # The first penalty is subtracted before the mean is computed, so that the result for equal penalties is 0.
        centered = penalties - penalties[:, :1]
        exists = ~np.isnan(advantages)
        centered -= centered.mean(axis=1, keepdims=True, where=exists)
        return (advantages - centered).astype(advantages.dtype), {
            "response/penalty": float(penalties[exists].sum() / max(exists.sum(), 1))
        }


def make_truncation(config: Config) -> Truncation:
    """Returns the treatment of truncated responses of a run."""
    algo, max_tokens = config.algo, config.sampling.max_tokens
    return Truncation(
        algo.truncated,
        max_tokens,
        algo.overlong_tokens or max(1, int(DEFAULT_FRACTION * max_tokens)),
        algo.overlong_penalty,
    )
