"""How the demonstrations that a base policy learns from are drawn."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Demonstrations:
    """The habits of a base policy: how often it errs and how strongly it prefers its favourite strategies.

    `error_rate` scales each task's own rate of deliberate mistakes: 0 is clean, 1 is the task's recipe. `skew` gives
    the strategy of rank k the weight exp(-skew k): 0 makes all strategies equally likely.

    Raises:
      ValueError: a setting is negative or not finite.
    """

    error_rate: float = 0.0
    skew: float = 0.0

    def rank(self, num_strategies: int, rng: np.random.Generator) -> int:
        """Draws the rank in [0, num_strategies) of the strategy to demonstrate."""
        weights = np.exp(-self.skew * np.arange(num_strategies))
        return int(rng.choice(num_strategies, p=weights / weights.sum()))

    def errs(self, probability: float, rng: np.random.Generator) -> bool:
        """Draws whether to spoil a demonstration that the task's recipe spoils with `probability`."""
        return bool(rng.random() < self.error_rate * probability)
