"""Set advantages for tinker-cookbook. Import this file before the training loop starts.

`compute_group_rewards` of the environments must return the metric `cluster`, the id of a strategy. The id 100 is
reserved for degenerate responses.
"""

import torch
from tinker_cookbook.distillation import sdft, train_on_policy
from tinker_cookbook.rl import train

from poly_epo_jax import set_rl

SET_SIZE = 4


def compute_advantages(trajectory_groups_P):
    """Computes the advantages of each group, one tensor [G] per group. They are 0 if G <= SET_SIZE."""
    advantages_P = []
    for group in trajectory_groups_P:
        rewards = torch.tensor([group.get_total_rewards()])
        if rewards.shape[1] <= SET_SIZE:
            advantages_P.append(torch.zeros(rewards.shape[1]))
            continue
        clusters = torch.tensor([[int(metrics["cluster"]) for metrics in group.metrics_G]])
        advantages_P.append(set_rl.polychromic_advantages(rewards, clusters, set_size=SET_SIZE)[0])
    return advantages_P


for module in (train, train_on_policy, sdft):  # they import the function by name
    module.compute_advantages = compute_advantages
