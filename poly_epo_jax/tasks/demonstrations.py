"""Style of the demonstrations on which a base policy is fitted."""

import dataclasses

import numpy as np
from jaxtyping import Real


@dataclasses.dataclass(frozen=True)
class DemonstrationStyle:
    """Error rate and strategy distribution of demonstrations.

    Attributes:
      error_rate: Non-negative multiplier of the task's probability of a deliberate mistake. 0 disables mistakes, 1 uses
        the task's own probability.
      skew: Non-negative preference for strategies of low rank or cost. The strategy of rank or cost k has the weight
        exp(-skew k), so 0 makes all strategies equally likely.
    """

    error_rate: float = 0.0
    skew: float = 0.0

    def choose(self, costs: Real[np.ndarray, " S"], rng: np.random.Generator) -> int:
        """Draws the index of a strategy, which has the weight exp(-skew cost).

        Args:
          costs: Costs of the S strategies, such as their ranks.
          rng: Random generator.
        """
        weights = np.exp(-self.skew * costs)
        return int(rng.choice(len(costs), p=weights / weights.sum()))

    def draw_mistake(self, probability: float, rng: np.random.Generator) -> bool:
        """Draws whether a demonstration contains a mistake.

        Args:
          probability: Probability of a mistake in the task's own demonstrations. It is multiplied by `error_rate`.
          rng: Random generator.

        Returns:
          True with probability `error_rate * probability`.
        """
        return bool(rng.random() < self.error_rate * probability)
