"""Advantage estimator for SkyRL. Import this file in the process that starts the trainer, before Ray is started.

Set trainer.algorithm.advantage_estimator=polychromic. The reward of a response is r + 2 c, with its reward r in [0, 1]
and its cluster id c, as in verl_set_rl.py.
"""

import numpy as np
import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import register_advantage_estimator

from poly_epo_jax import set_rl

SET_SIZE = 4


@register_advantage_estimator("polychromic")
def polychromic(token_level_rewards, response_mask, index, **others):
    """Computes set advantages.

    Args:
      token_level_rewards: Rewards per token [P * N, T]. Responses can be in any order.
      response_mask: 1 for response tokens, 0 for padding [P * N, T].
      index: Prompt id of each response [P * N].

    Returns:
      Advantages and returns [P * N, T], which are equal.
    """
    scores = token_level_rewards.float().sum(dim=-1)
    order = torch.as_tensor(np.argsort(index, kind="stable"), device=scores.device)
    groups = scores[order].reshape(len(set(index)), -1)  # [P, N]
    clusters = (groups / 2).floor()
    advantages = torch.empty_like(scores)
    advantages[order] = set_rl.polychromic_advantages(groups - 2 * clusters, clusters.int(), set_size=SET_SIZE).ravel()
    per_token = advantages[:, None] * response_mask
    return per_token, per_token
