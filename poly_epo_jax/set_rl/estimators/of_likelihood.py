"""Estimators that reward a correct generation more the less likely it was under the policy."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from poly_epo_jax.set_rl.groups import centred, check_features


def unlikeliness_advantages(
    rewards: Float[Array | np.ndarray, "P N"], mean_logprob: Float[Array | np.ndarray, "P N"], beta: float
) -> Float[Array, "P N"]:
    """The unlikeliness reward (He et al., arXiv 2506.02355): centred r_i (1 - beta rank_i / N).

    rank_i counts the generations of the prompt, correct or not, that are less likely than i by the mean log-probability
    of their tokens: 0 for the least likely one, N - 1 for the likeliest, which loses the largest part of its reward.

    The authors' code (AndreHe02/rewarding-unlikely-release) divides by the standard deviation of these rewards, as GRPO
    originally did; we never do, and neither does the Poly-EPO paper. Equally likely generations share their mean rank
    here; there a sort decides, which would reward one of two equal ones more.

    Args:
      beta: at most 1; the authors use 0.25.

    Raises:
      ValueError: on NaN (detected outside jit only); on mismatched shapes.
    """
    _, num_generations = check_features(rewards=rewards, mean_logprob=mean_logprob)
    rewards, mean_logprob = jnp.asarray(rewards), jnp.asarray(mean_logprob)
    less_likely = mean_logprob[:, None, :] < mean_logprob[:, :, None]
    as_likely = mean_logprob[:, None, :] == mean_logprob[:, :, None]
    rank = less_likely.sum(axis=-1) + (as_likely.sum(axis=-1) - 1) / 2
    return centred(rewards * (1 - beta * rank / num_generations))


def ucpo_advantages(
    rewards: Float[Array | np.ndarray, "P N"], mean_logprob: Float[Array | np.ndarray, "P N"], tau: float
) -> Float[Array, "P N"]:
    """UCPO (arXiv 2605.00365): the correct generations' advantage is redistributed among them by 1 / likelihood.

    With GRPO's A, c correct generations, l_i the mean log-probability of i's tokens and q the softmax of l over the
    correct ones, a correct one gets A c [(1 - tau) / c + tau (1 / q_i) / sum_j 1 / q_j]; an incorrect one keeps its A.
    Since 1 / q_i over their sum is a softmax of -l, it is computed as one.

    The authors' code (AnamikaLochab/UCPO, "iq") does this after dividing by the standard deviation, which we leave out.
    It also counts every reward above 0 as correct, and uses the first one's A for all. For graded rewards we
    redistribute the advantages of those above the mean, in proportion to A_i / q_i: for 0/1 rewards it is the same.

    Args:
      tau: 0 is GRPO, 1 redistributes everything; the authors' runs use 0.2, their code 0.3.

    Raises:
      ValueError: on NaN (detected outside jit only); on mismatched shapes.
    """
    check_features(rewards=rewards, mean_logprob=mean_logprob)
    advantages = centred(jnp.asarray(rewards))
    is_above = advantages > 0
    scores = jnp.where(is_above, jnp.log(jnp.where(is_above, advantages, 1)) - jnp.asarray(mean_logprob), -jnp.inf)
    largest = jnp.where(is_above.any(axis=-1, keepdims=True), scores.max(axis=-1, keepdims=True), 0)
    shares = jnp.exp(scores - largest)
    shares /= jnp.maximum(shares.sum(axis=-1, keepdims=True), 1)  # the largest is 1, where there is one
    to_share = jnp.where(is_above, advantages, 0).sum(axis=-1, keepdims=True)
    return jnp.where(is_above, (1 - tau) * advantages + tau * to_share * shares, advantages)
