"""Set advantages for slime: --custom-reward-post-process-path slime_set_rl.set_advantages --reward-key score.

The reward of a sample is the dict {"score": ..., "cluster": ...}. The cluster id 100 is reserved for degenerate
responses. With --advantage-estimator=grpo, the results are the advantages of all tokens of a sample.
"""

import torch

from poly_epo_jax import set_rl

SET_SIZE = 4


def set_advantages(args, samples):
    """Returns the rewards and the set advantages of samples, in groups of args.n_samples_per_prompt."""
    scores = [sample.reward["score"] for sample in samples]
    clusters = [sample.reward["cluster"] for sample in samples]
    shape = (-1, args.n_samples_per_prompt)
    rewards, clusters = torch.tensor(scores).reshape(shape), torch.tensor(clusters).reshape(shape)
    return scores, set_rl.polychromic_advantages(rewards, clusters, set_size=SET_SIZE).ravel().tolist()
