"""A reward function for TRL's GRPOTrainer that returns set advantages."""

import torch

from poly_epo_jax import set_rl
from poly_epo_jax.judges.exact import clusters_of

SETTINGS = {
    "num_generations": 8,
    "scale_rewards": "none",
    "loss_type": "dr_grpo",
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "beta": 0.0,
}


def polychromic(grade, num_generations=SETTINGS["num_generations"], set_size=4):
    """Creates a reward function for `reward_funcs`.

    Args:
      grade: Function that maps completions, and the dataset columns as keyword arguments, to two lists: rewards in
        [0, 1], and strategies, such as strings, with None for degenerate responses.
      num_generations: Number N of generations per prompt.
      set_size: Number n of generations per set.

    Returns:
      A function that returns the advantages of a list of completions, in their order.
    """

    def polychromic_advantage(completions, log_metric=None, **columns):
        rewards, strategies = grade(completions, **columns)
        if log_metric:
            log_metric("true_reward", sum(rewards) / len(rewards))
        rewards = torch.tensor(rewards).reshape(-1, num_generations)
        clusters = clusters_of(strategies).ids.reshape(-1, num_generations)  # never 100 for a strategy
        return set_rl.polychromic_advantages(rewards, clusters, set_size=set_size).ravel().tolist()

    return polychromic_advantage
