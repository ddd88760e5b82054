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
    reward_plus_diversity_advantages,
)
from poly_epo_jax.set_rl.estimators.best_of_k import pass_at_n_advantages, passk_advantages, pkpo_advantages
from poly_epo_jax.set_rl.estimators.of_clusters import (
    darling_advantages,
    shaped_product_advantages,
    uniqueness_advantages,
)
from poly_epo_jax.set_rl.estimators.of_embeddings import (
    dqo_advantages,
    rep_exp_advantages,
    set_dpp_advantages,
    set_po_advantages,
)
from poly_epo_jax.set_rl.estimators.of_likelihood import ucpo_advantages, unlikeliness_advantages
from poly_epo_jax.set_rl.estimators.of_rewards import entropic_advantages, max_rl_advantages, rs_grpo_advantages
from poly_epo_jax.set_rl.losses import (
    LOSSES,
    SILENT_AT_ZERO,
    Loss,
    Tokens,
    cispo_loss,
    clip_cov_loss,
    gspo_loss,
    kl_cov_loss,
    kl_estimate,
    policy_gradient_loss,
    ppo_clip_loss,
    sequence_means,
    token_weights,
)
from poly_epo_jax.set_rl.objectives import (
    OBJECTIVES,
    Objective,
    determinant,
    mean_reward,
    pass_at_n,
    polychromic,
    reward_plus_diversity,
)
from poly_epo_jax.set_rl.sets import enumerate_sets, sample_sets
from poly_epo_jax.types import DEGENERATE_CLUSTER

__all__ = [
    "DEGENERATE_CLUSTER",
    "LOSSES",
    "OBJECTIVES",
    "SILENT_AT_ZERO",
    "Loss",
    "Objective",
    "Synergy",
    "Tokens",
    "cispo_loss",
    "clip_cov_loss",
    "darling_advantages",
    "determinant",
    "dqo_advantages",
    "entropic_advantages",
    "enumerate_sets",
    "exploration_exploitation_synergy",
    "features_read",
    "grpo_advantages",
    "grpo_div_advantages",
    "gspo_loss",
    "kl_cov_loss",
    "kl_estimate",
    "marginal_set_advantages",
    "max_rl_advantages",
    "mean_reward",
    "pass_at_n",
    "pass_at_n_advantages",
    "passk_advantages",
    "pkpo_advantages",
    "policy_gradient_loss",
    "polychromic",
    "polychromic_advantages",
    "ppo_clip_loss",
    "rep_exp_advantages",
    "reward_plus_diversity",
    "reward_plus_diversity_advantages",
    "rs_grpo_advantages",
    "sample_sets",
    "sequence_means",
    "set_dpp_advantages",
    "set_po_advantages",
    "shaped_product_advantages",
    "token_weights",
    "ucpo_advantages",
    "uniqueness_advantages",
    "unlikeliness_advantages",
]
