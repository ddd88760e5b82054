"""Estimators that favor generations unlike the others of their prompt, using embeddings [P, N, D] from the judge.

Three of them use the gain of a generation: the decrease of a diversity measure of the group when the generation is
removed. For log det(I + K), the gain is -log of the i-th diagonal element of (I + K)^-1, so one matrix inverse gives
all N gains.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from poly_epo_jax.set_rl.groups import Embeddings, Scalars, as_features, returns_kind_of_input, subtract_mean


@returns_kind_of_input
def rep_exp_advantages(
    rewards: Scalars,
    embeddings: Embeddings,
    beta: float,
    ridge: float = 0.01,
) -> Float[Array, "P N"]:
    """Computes the advantages of representation-based exploration (arXiv 2510.11686): centered r_i + beta h_i.

    The elliptical bonus is h_i = e_i' (sum_j e_j e_j' + ridge I)^-1 e_i, where e are the prompt's embeddings minus
    their mean. It is 0 if all embeddings are equal, and approaches 1 for an embedding in a direction that no other
    embedding has. Prompts without a positive reward get no bonus.

    This follows the authors' runs (verl-project/verl-recipe, rep_exp: "leverage", no persistence). Their embeddings are
    mean hidden states of a response, reduced to 32 dimensions by a sparse random projection. With N <= D and a small
    ridge, all bonuses are nearly equal. The authors also divide by the standard deviation, which is omitted here. Like
    the authors, this function computes the bonus in float64, regardless of `jax_enable_x64`: hidden states often have a
    few very large components, which float32 cannot resolve together with the others. TPUs do not support
    eigenvalue decompositions in float64, so the bonus of such embeddings is only accurate on TPUs if they are
    normalized first. The bonus cannot be differentiated with respect to the embeddings.

    Args:
      rewards: Rewards of the N generations of P prompts.
      embeddings: Embeddings of the generations, with D dimensions.
      beta: Coefficient of the bonus. The authors use 0.01.
      ridge: Regularization of the inverse. The authors use 0.01.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If a feature is invalid (see `as_features`).
    """
    rewards, embeddings = as_features(rewards=rewards, embeddings=embeddings)
    in_float32, in_float64 = (partial(of, ridge=ridge) for of in (_elliptical_bonus, _elliptical_bonus_in_float64))
    bonus = jax.lax.platform_dependent(embeddings, tpu=in_float32, default=in_float64)
    has_reward = (rewards > 0).any(axis=-1, keepdims=True)
    return subtract_mean(rewards + beta * jnp.where(has_reward, bonus, 0))


@returns_kind_of_input
def dqo_advantages(rewards: Scalars, embeddings: Embeddings, weight: float) -> Float[Array, "P N"]:
    """Computes DQO's advantages (arXiv 2509.04784): centered r_i + weight g_i, with g the gain in embedding volume.

    g_i = log det(I + K) - log det(I + K without i), where K holds the cosine similarities between the prompt's
    embeddings. The gain is log 2 for a response that is orthogonal to all others, and decreases with the number of
    similar responses. This is the paper's leave-one-out estimator of sum r + weight log det K, with I added to keep the
    logarithm finite.

    The paper does not normalize the embeddings; cosine similarities normalize their length to 1. The sum is centered,
    as in GRPO; the paper's estimator, log det(I + K) / det(I + K without i), has no additional baseline. The authors'
    code (fairytale9/diversity-quality-optimization) was not available for comparison.

    Args:
      rewards: Rewards of the N generations of P prompts.
      embeddings: Embeddings of the generations, with D dimensions.
      weight: Coefficient of the gain, alpha in the paper. Its main runs use 1, and its ablation 0.5 and 2.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If a feature is invalid (see `as_features`).
    """
    rewards, embeddings = as_features(rewards=rewards, embeddings=embeddings)
    return subtract_mean(rewards + weight * _gains(cosines(embeddings), embeddings))


@returns_kind_of_input
def set_dpp_advantages(rewards: Scalars, embeddings: Embeddings, scale: float) -> Float[Array, "P N"]:
    """Computes advantages from the gain g_i in the volume of rewarded responses: centered g_i.

    g_i = [log det(I + scale L) - log det(I + scale L without i)] / log(1 + scale), with L_ij = sqrt(r_i r_j) cos_ij:
    the kernel of a determinantal point process of quality and diversity (Kulesza and Taskar, arXiv 1207.6083).
    `dqo_advantages` adds reward and diversity, whereas this estimator multiplies them. The gain of an incorrect
    response is 0; the gain of a correct response is 1 if it is orthogonal to all other correct responses. The
    advantages equal GRPO's in the limit of scale 0, or if all embeddings are orthogonal and rewards are 0 or 1.

    We know of no paper with this estimator. It relates to DQO as `shaped_product_advantages` relates to GRPO+DIV.

    Args:
      rewards: Rewards of the N generations of P prompts. Negative rewards are treated as 0.
      embeddings: Embeddings of the generations, with D dimensions.
      scale: Positive factor of the kernel. Larger values reduce the gain of repeated responses.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If a feature is invalid (see `as_features`).
    """
    rewards, embeddings = as_features(rewards=rewards, embeddings=embeddings)
    # diag(r) cos and L have equal determinants. Without square roots, derivatives at a reward of 0 are finite.
    kernel = scale * jnp.where(rewards < 0, 0, rewards)[:, :, None] * cosines(embeddings)
    generations = jnp.concatenate([rewards[:, :, None], embeddings], axis=2)
    return subtract_mean(_gains(kernel, generations) / jnp.log1p(scale))


@returns_kind_of_input
def set_po_advantages(rewards: Scalars, embeddings: Embeddings, weight: float) -> Float[Array, "P N"]:
    """Computes SetPO's advantages (arXiv 2602.01062): centered r_i + weight g_i, with g the gain in group diversity.

    g_i = D(all) - D(all without i), where D(S) = mean over i in S of -log(1 + mean over j in S of k_ij) is the
    diversity of the group S. The similarity k_ij is the cosine, or 0 if the cosine is negative.

    In the paper, D is the mean of a non-increasing function of mean k, for a bounded symmetric k. Here, the function is
    -log(1 + x).
    The means over j include i, as for the empirical distribution in the paper's functional. The paper adds the gain to
    the advantage without centering; here it is centered, as rewards are in GRPO. The authors' code (chenyili0818/SetPO)
    was not available, so their kernel and weight are not confirmed.

    Args:
      rewards: Rewards of the N generations of P prompts.
      embeddings: Embeddings of the generations, with D dimensions.
      weight: Coefficient of the gain.

    Returns:
      Advantages [P, N].

    Raises:
      ValueError: If a feature is invalid (see `as_features`).
    """
    rewards, embeddings = as_features(rewards=rewards, embeddings=embeddings)
    num_generations, num_others = rewards.shape[1], max(rewards.shape[1] - 1, 1)
    kernel = jnp.maximum(cosines(embeddings), 0)
    mass = kernel.sum(axis=-1)
    whole = -jnp.log1p(mass / num_generations).mean(axis=-1, keepdims=True)
    without = -jnp.log1p((mass[:, None, :] - kernel) / num_others)  # [P, removed i, j]
    itself = jnp.diagonal(without, axis1=1, axis2=2)
    without = (without.sum(axis=-1) - itself) / num_others
    return subtract_mean(rewards + weight * (whole - without))


def cosines(embeddings: Float[Array | np.ndarray, "*sets n D"]) -> Float[Array, "*sets n n"]:
    """Returns the cosine similarities between the embeddings of each set, and 0 for zero embeddings.

    Args:
      embeddings: Embeddings of the n generations of each set, with D dimensions.
    """
    embeddings = jnp.asarray(embeddings, float)
    lengths = jnp.linalg.norm(embeddings, axis=-1, keepdims=True)
    return _inner_products(embeddings / jnp.where(lengths > 0, lengths, 1))


def log_volume(kernel: Float[Array, "*sets n n"]) -> Float[Array, "*sets"]:
    """Returns log det(I + K) for positive semi-definite kernels K."""
    factor = jnp.linalg.cholesky(_plus_identity(kernel))
    return 2 * jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).sum(axis=-1)


def _elliptical_bonus(embeddings: Float[Array, "P N D"], ridge: float) -> Float[Array, "P N"]:
    """Returns h_i of `rep_exp_advantages`."""
    differences = embeddings - embeddings[:, :1]  # equal embeddings become exactly 0
    differences -= differences.mean(axis=1, keepdims=True)
    values, vectors = jnp.linalg.eigh(_inner_products(differences))
    resolved = embeddings.shape[1] * jnp.finfo(values.dtype).eps * values[:, -1:]
    values = jnp.where(values > resolved, values, 0)  # smaller or negative values are rounding errors
    return (vectors**2 * (values / (values + ridge))[:, None, :]).sum(axis=-1)


def _elliptical_bonus_in_float64(embeddings: Float[Array, "P N D"], ridge: float) -> Float[Array, "P N"]:
    with jax.enable_x64(True):
        return _elliptical_bonus(embeddings.astype(jnp.float64), ridge).astype(embeddings.dtype)


def _gains(kernel: Float[Array, "P N N"], generations: Float[Array, "P N F"]) -> Float[Array, "P N"]:
    """Returns log det(I + K) - log det(I + K without i) for each i, between 0 and log(1 + K_ii).

    The gain is -log(1 - t_i), where t is the diagonal of (I + K)^-1 K, which is accurate for small K as well.

    Args:
      kernel: The kernels K.
      generations: Values that determine the kernels. If they are equal for all generations of a prompt, the gains are
        exactly equal.
    """
    own = jnp.diagonal(kernel, axis1=1, axis2=2)
    taken = jnp.diagonal(jnp.linalg.solve(_plus_identity(kernel), kernel), axis1=1, axis2=2)
    max_taken = own / (1 + own)
    taken = jnp.where(taken < 0, 0, jnp.where(taken > max_taken, max_taken, taken))  # rounding may exceed the bounds
    are_equal = (generations == generations[:, :1]).all(axis=(1, 2))[:, None]
    return -jnp.log1p(-jnp.where(are_equal, taken[:, :1], taken))


def _plus_identity(kernel: Float[Array, "*sets n n"]) -> Float[Array, "*sets n n"]:
    return kernel + jnp.broadcast_to(jnp.eye(kernel.shape[-1]), kernel.shape)


def _inner_products(vectors: Float[Array, "*sets n D"]) -> Float[Array, "*sets n n"]:
    return jnp.einsum("...id,...jd->...ij", vectors, vectors, precision="highest")
