"""Set RL as pure functions: sets, set objectives, advantages and losses. The functions only use JAX and NumPy.

```
sets = set_rl.enumerate_sets(num_generations=8, set_size=4)
advantages = set_rl.marginal_set_advantages(set_rl.polychromic, sets, rewards=rewards, clusters=clusters)
advantages = set_rl.polychromic_advantages(rewards, clusters, set_size=4)  # equal, in closed form
```
"""

from poly_epo_jax.set_rl.advantages import Synergy as Synergy
from poly_epo_jax.set_rl.advantages import exploration_exploitation_synergy as exploration_exploitation_synergy
from poly_epo_jax.set_rl.advantages import features_read as features_read
from poly_epo_jax.set_rl.advantages import grpo_advantages as grpo_advantages
from poly_epo_jax.set_rl.advantages import grpo_div_advantages as grpo_div_advantages
from poly_epo_jax.set_rl.advantages import marginal_set_advantages as marginal_set_advantages
from poly_epo_jax.set_rl.advantages import polychromic_advantages as polychromic_advantages
from poly_epo_jax.set_rl.advantages import reward_plus_diversity_advantages as reward_plus_diversity_advantages
from poly_epo_jax.set_rl.estimators.best_of_k import pass_at_n_advantages as pass_at_n_advantages
from poly_epo_jax.set_rl.estimators.best_of_k import passk_advantages as passk_advantages
from poly_epo_jax.set_rl.estimators.best_of_k import pkpo_advantages as pkpo_advantages
from poly_epo_jax.set_rl.estimators.of_clusters import darling_advantages as darling_advantages
from poly_epo_jax.set_rl.estimators.of_clusters import shaped_product_advantages as shaped_product_advantages
from poly_epo_jax.set_rl.estimators.of_clusters import uniqueness_advantages as uniqueness_advantages
from poly_epo_jax.set_rl.estimators.of_embeddings import dqo_advantages as dqo_advantages
from poly_epo_jax.set_rl.estimators.of_embeddings import rep_exp_advantages as rep_exp_advantages
from poly_epo_jax.set_rl.estimators.of_embeddings import set_dpp_advantages as set_dpp_advantages
from poly_epo_jax.set_rl.estimators.of_embeddings import set_po_advantages as set_po_advantages
from poly_epo_jax.set_rl.estimators.of_likelihood import ucpo_advantages as ucpo_advantages
from poly_epo_jax.set_rl.estimators.of_likelihood import unlikeliness_advantages as unlikeliness_advantages
from poly_epo_jax.set_rl.estimators.of_rewards import entropic_advantages as entropic_advantages
from poly_epo_jax.set_rl.estimators.of_rewards import max_rl_advantages as max_rl_advantages
from poly_epo_jax.set_rl.estimators.of_rewards import rs_grpo_advantages as rs_grpo_advantages
from poly_epo_jax.set_rl.losses import LOSSES as LOSSES
from poly_epo_jax.set_rl.losses import SILENT_AT_ZERO as SILENT_AT_ZERO
from poly_epo_jax.set_rl.losses import Loss as Loss
from poly_epo_jax.set_rl.losses import Tokens as Tokens
from poly_epo_jax.set_rl.losses import cispo_loss as cispo_loss
from poly_epo_jax.set_rl.losses import clip_cov_loss as clip_cov_loss
from poly_epo_jax.set_rl.losses import gspo_loss as gspo_loss
from poly_epo_jax.set_rl.losses import kl_cov_loss as kl_cov_loss
from poly_epo_jax.set_rl.losses import kl_estimate as kl_estimate
from poly_epo_jax.set_rl.losses import policy_gradient_loss as policy_gradient_loss
from poly_epo_jax.set_rl.losses import ppo_clip_loss as ppo_clip_loss
from poly_epo_jax.set_rl.losses import sequence_means as sequence_means
from poly_epo_jax.set_rl.losses import token_weights as token_weights
from poly_epo_jax.set_rl.objectives import OBJECTIVES as OBJECTIVES
from poly_epo_jax.set_rl.objectives import Objective as Objective
from poly_epo_jax.set_rl.objectives import determinant as determinant
from poly_epo_jax.set_rl.objectives import mean_reward as mean_reward
from poly_epo_jax.set_rl.objectives import pass_at_n as pass_at_n
from poly_epo_jax.set_rl.objectives import polychromic as polychromic
from poly_epo_jax.set_rl.objectives import reward_plus_diversity as reward_plus_diversity
from poly_epo_jax.set_rl.sets import enumerate_sets as enumerate_sets
from poly_epo_jax.set_rl.sets import sample_sets as sample_sets
from poly_epo_jax.types import DEGENERATE_CLUSTER as DEGENERATE_CLUSTER
