"""Advantage estimator and reward function for verl. Import this file in the process that starts the trainer.

Set algorithm.adv_estimator=polychromic, and custom_reward_function.path to the path of this file.
"""

import zlib

import numpy as np
import torch
from verl.trainer.ppo.core_algos import register_adv_est

from poly_epo_jax import set_rl

SET_SIZE, MAX_CLUSTERS = 4, 2**20


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Returns the reward plus twice the cluster id, which is computed from the text after the last "Answer:"."""
    _, mark, answer = solution_str.rpartition("Answer:")
    reward = float(mark != "" and answer.strip() == ground_truth)
    if not mark:
        return 2 * set_rl.DEGENERATE_CLUSTER + reward
    return 2 * (set_rl.DEGENERATE_CLUSTER + 1 + zlib.crc32(answer.strip().encode()) % MAX_CLUSTERS) + reward


@register_adv_est("polychromic")
def polychromic(token_level_rewards, response_mask, index, config=None, **others):
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
