"""Set RL as pure functions: sets, set objectives, advantages, losses. Needs JAX and NumPy only.

```
sets = set_rl.enumerate_sets(num_generations=8, set_size=4)
advantages = set_rl.marginal_set_advantages(set_rl.polychromic, sets, rewards=rewards, clusters=clusters)
advantages = set_rl.polychromic_advantages(rewards, clusters, set_size=4)  # the same, in closed form
```
"""

from poly_epo_jax.set_rl.advantages import (
    Synergy,
    exploration_exploitation_synergy,
    features_read,
    grpo_advantages,
    grpo_div_advantages,
    marginal_set_advantages,
    polychromic_advantages,
)
from poly_epo_jax.set_rl.losses import (
    LOSSES,
    Loss,
    Tokens,
    cispo_loss,
    kl_estimate,
    policy_gradient_loss,
    ppo_clip_loss,
    sequence_means,
    token_weights,
)
from poly_epo_jax.set_rl.objectives import OBJECTIVES, Objective, mean_reward, pass_at_n, polychromic
from poly_epo_jax.set_rl.sets import enumerate_sets, sample_sets
from poly_epo_jax.types import DEGENERATE_CLUSTER

__all__ = [
    "DEGENERATE_CLUSTER",
    "LOSSES",
    "OBJECTIVES",
    "Loss",
    "Objective",
    "Synergy",
    "Tokens",
    "cispo_loss",
    "enumerate_sets",
    "exploration_exploitation_synergy",
    "features_read",
    "grpo_advantages",
    "grpo_div_advantages",
    "kl_estimate",
    "marginal_set_advantages",
    "mean_reward",
    "pass_at_n",
    "policy_gradient_loss",
    "polychromic",
    "polychromic_advantages",
    "ppo_clip_loss",
    "sample_sets",
    "sequence_means",
    "token_weights",
]
