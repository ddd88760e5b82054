"""Estimators that favor correct generations with a low likelihood under the sampling policy."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from poly_epo_jax.set_rl.groups import Scalars, as_features, returns_kind_of_input, subtract_mean


@returns_kind_of_input
def unlikeliness_advantages(rewards: Scalars, mean_logprob: Scalars, beta: float) -> Float[Array, "P N"]:
    """Computes advantages from the unlikeliness reward (He et al., arXiv 2506.02355).

    A_i is the centered r_i (1 - beta rank_i / N), where rank_i is the number of generations of the prompt, correct or
    not, with a smaller mean log-probability than i. It is 0 for the least likely generation and N - 1 for the most
    likely one, whose reward is reduced most.

    The authors' code (AndreHe02/rewarding-unlikely-release) divides by the standard deviation of these rewards, as in
    the original GRPO. This division is omitted here, as in the Poly-EPO paper. Equally likely generations share their
    mean rank here. In the authors' code, a sort breaks ties, so one of two equal generations gets a larger reward.

    Args:
      rewards: Rewards of the N generations of P prompts.
      mean_logprob: Mean log-probability of the tokens of each generation under the sampling policy, in nats.
      beta: Upper limit of the fraction by which a reward is reduced, at most 1. The authors use 0.25.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If a feature is invalid (see `as_features`).
    """
    rewards, mean_logprob = as_features(rewards=rewards, mean_logprob=mean_logprob)
    less_likely = mean_logprob[:, None, :] < mean_logprob[:, :, None]
    as_likely = mean_logprob[:, None, :] == mean_logprob[:, :, None]
    rank = less_likely.sum(axis=-1) + (as_likely.sum(axis=-1) - 1) / 2
    return subtract_mean(rewards * (1 - beta * rank / rewards.shape[1]))


@returns_kind_of_input
def ucpo_advantages(rewards: Scalars, mean_logprob: Scalars, tau: float) -> Float[Array, "P N"]:
    """Computes UCPO's advantages (arXiv 2605.00365), which favor the less likely correct generations.

    Let A be GRPO's advantage, c the number of correct generations, l_i the mean log-probability of i's tokens, and q
    the softmax of l over the correct generations. The advantage of a correct generation is A c [(1 - tau) / c + tau (1
    / q_i) / sum_j 1 / q_j]; incorrect generations keep A. The normalized 1 / q_i is computed as a softmax of -l.

    The authors' code (AnamikaLochab/UCPO, "iq") first divides by the standard deviation, which is omitted here. It
    counts all rewards above 0 as correct, and uses the advantage of the first correct generation for all. For graded
    rewards, the advantages above 0 are redistributed here in proportion to A_i / q_i; for 0/1 rewards, the result is
    the same.

    Args:
      rewards: Rewards of the N generations of P prompts.
      mean_logprob: Mean log-probability of the tokens of each generation under the sampling policy, in nats.
      tau: Redistributed fraction of the positive advantages. 0 gives GRPO's advantages. The authors' runs use 0.2, and
        their code 0.3.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If a feature is invalid (see `as_features`).
    """
    rewards, mean_logprob = as_features(rewards=rewards, mean_logprob=mean_logprob)
    advantages = subtract_mean(rewards)
    is_above = advantages > 0
    scores = jnp.where(is_above, jnp.log(jnp.where(is_above, advantages, 1)) - mean_logprob, -jnp.inf)
    largest = jnp.where(is_above.any(axis=-1, keepdims=True), scores.max(axis=-1, keepdims=True), 0)
    shares = jnp.exp(scores - largest)
    shares /= jnp.maximum(shares.sum(axis=-1, keepdims=True), 1)  # at least 1 if any advantage is positive
    to_share = jnp.where(is_above, advantages, 0).sum(axis=-1, keepdims=True)
    return jnp.where(is_above, (1 - tau) * advantages + tau * to_share * shares, advantages)
