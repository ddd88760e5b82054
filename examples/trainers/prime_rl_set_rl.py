"""Replaces the algorithm `grpo` of prime-rl with set advantages.

The environment must report the metric `cluster`, the id of a strategy. The id 100 is reserved for degenerate responses.
"""

import torch
from prime_rl.orchestrator.algo import ALGORITHM_CLASSES
from prime_rl.orchestrator.algo.base import Algorithm, iter_trainable_traces
from prime_rl.orchestrator.algo.routing import assign_advantages

from poly_epo_jax import set_rl

SET_SIZE = 4


class Polychromic(Algorithm):
    """Assigns set advantages to the episodes of each group."""

    async def score_group(self, episodes):
        traces = [trace for _, trace in iter_trainable_traces(episodes)]  # without failed episodes
        if len(traces) <= SET_SIZE:
            return
        rewards = torch.tensor([[trace.reward for trace in traces]])
        clusters = torch.tensor([[int(trace.metrics["cluster"]) for trace in traces]])
        advantages = set_rl.polychromic_advantages(rewards, clusters, set_size=SET_SIZE)
        for trace, advantage in zip(traces, advantages[0].tolist(), strict=True):
            assign_advantages(trace, advantage)


ALGORITHM_CLASSES["grpo"] = Polychromic
