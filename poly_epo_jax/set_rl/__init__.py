"""Set RL as pure functions: sets, set objectives, advantages and losses. The functions only use JAX and NumPy.

```
sets = set_rl.enumerate_sets(num_generations=8, set_size=4)
advantages = set_rl.marginal_set_advantages(set_rl.polychromic, sets, rewards=rewards, clusters=clusters)
advantages = set_rl.polychromic_advantages(rewards, clusters, set_size=4)  # equal, in closed form
```
"""

from poly_epo_jax.set_rl.advantages import (
    Synergy as Synergy,
    exploration_exploitation_synergy as exploration_exploitation_synergy,
    features_read as features_read,
    grpo_advantages as grpo_advantages,
    grpo_div_advantages as grpo_div_advantages,
    marginal_set_advantages as marginal_set_advantages,
    polychromic_advantages as polychromic_advantages,
    reward_plus_diversity_advantages as reward_plus_diversity_advantages,
)
from poly_epo_jax.set_rl.estimators.best_of_k import (
    pass_at_n_advantages as pass_at_n_advantages,
    passk_advantages as passk_advantages,
    pkpo_advantages as pkpo_advantages,
)
from poly_epo_jax.set_rl.estimators.cluster_based import (
    darling_advantages as darling_advantages,
    shaped_product_advantages as shaped_product_advantages,
    uniqueness_advantages as uniqueness_advantages,
)
from poly_epo_jax.set_rl.estimators.embedding_based import (
    dqo_advantages as dqo_advantages,
    rep_exp_advantages as rep_exp_advantages,
    set_dpp_advantages as set_dpp_advantages,
    set_po_advantages as set_po_advantages,
)
from poly_epo_jax.set_rl.estimators.likelihood_based import (
    ucpo_advantages as ucpo_advantages,
    unlikeliness_advantages as unlikeliness_advantages,
)
from poly_epo_jax.set_rl.estimators.reward_based import (
    entropic_advantages as entropic_advantages,
    max_rl_advantages as max_rl_advantages,
    rs_grpo_advantages as rs_grpo_advantages,
)
from poly_epo_jax.set_rl.losses import (
    LOSSES as LOSSES,
    ZERO_GRADIENT_AT_ZERO_ADVANTAGE as ZERO_GRADIENT_AT_ZERO_ADVANTAGE,
    Loss as Loss,
    Tokens as Tokens,
    cispo_loss as cispo_loss,
    clip_cov_loss as clip_cov_loss,
    gspo_loss as gspo_loss,
    kl_cov_loss as kl_cov_loss,
    kl_estimate as kl_estimate,
    policy_gradient_loss as policy_gradient_loss,
    ppo_clip_loss as ppo_clip_loss,
    sequence_means as sequence_means,
    token_weights as token_weights,
)
from poly_epo_jax.set_rl.objectives import (
    OBJECTIVES as OBJECTIVES,
    Objective as Objective,
    determinant as determinant,
    mean_reward as mean_reward,
    pass_at_n as pass_at_n,
    polychromic as polychromic,
    reward_plus_diversity as reward_plus_diversity,
)
from poly_epo_jax.set_rl.sets import enumerate_sets as enumerate_sets, sample_sets as sample_sets
from poly_epo_jax.types import DEGENERATE_CLUSTER as DEGENERATE_CLUSTER
