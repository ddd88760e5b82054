"""Estimators that reward a generation for being unlike the others, by embeddings [P, N, D] that a judge adds.

Three of them use a response's gain: what a measure of the whole group loses without it. For log det(I + K) this is
-log of the i-th diagonal element of (I + K)^-1, so one inverse gives the gains of all N.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from poly_epo_jax.set_rl.groups import centred, check_features


def rep_exp_advantages(
    rewards: Float[Array | np.ndarray, "P N"],
    embeddings: Float[Array | np.ndarray, "P N D"],
    beta: float,
    ridge: float = 0.01,
) -> Float[Array, "P N"]:
    """Representation-based exploration (arXiv 2510.11686): centred r_i + beta h_i, h the elliptical bonus.

    h_i = e_i' (sum_j e_j e_j' + ridge I)^-1 e_i, with e the prompt's embeddings minus their mean: from 0 for one like
    all others to nearly 1 for one that points where no other does. A prompt without a reward gets no bonus.

    As in the authors' runs (verl-project/verl-recipe, rep_exp: "leverage", no persistence), whose embeddings are the
    mean hidden states of a response, brought to 32 dimensions by a sparse random projection; with N <= D and a small
    ridge all bonuses are alike. They finally divide by the standard deviation, which we never do, and take an inverse
    in float64, where float32 and N eigenvalues suffice here.

    Args:
      beta: the authors use 0.01.
      ridge: the authors use 0.01.

    Raises:
      ValueError: on NaN (detected outside jit only); on mismatched shapes.
    """
    _, num_generations = check_features(rewards=rewards, embeddings=embeddings)
    rewards, embeddings = jnp.asarray(rewards), jnp.asarray(embeddings, float)
    differences = embeddings - embeddings[:, :1]  # so that equal embeddings are exactly 0
    differences -= differences.mean(axis=1, keepdims=True)
    values, vectors = jnp.linalg.eigh(_inner_products(differences))
    resolved = num_generations * jnp.finfo(values.dtype).eps * values[:, -1:]
    values = jnp.where(values > resolved, values, 0)  # smaller ones are rounding, and none may be negative
    bonus = (vectors**2 * (values / (values + ridge))[:, None, :]).sum(axis=-1)
    is_paid = (rewards > 0).any(axis=-1, keepdims=True)
    return centred(rewards + beta * jnp.where(is_paid, bonus, 0))


def dqo_advantages(
    rewards: Float[Array | np.ndarray, "P N"], embeddings: Float[Array | np.ndarray, "P N D"], weight: float
) -> Float[Array, "P N"]:
    """DQO (arXiv 2509.04784): centred r_i + weight g_i, g the gain in the volume that the embeddings span.

    g_i = log det(I + K) - log det(I + K without i), K the cosines between the prompt's embeddings: log 2 for a response
    that is orthogonal to all others, and less the more others are like it. This is the paper's leave-one-out estimator
    of sum r + weight log det K, made finite by I.

    The paper leaves the length of embeddings to the encoder; cosines make it 1. We centre the sum, as GRPO does; the
    paper's estimator, log det(I + K) / det(I + K without i), has no further baseline. The authors' code
    (fairytale9/diversity-quality-optimization) could not be obtained, and is not compared.

    Args:
      weight: the paper's alpha; its main runs use 1, and its ablation 0.5 and 2.

    Raises:
      ValueError: on NaN (detected outside jit only); on mismatched shapes.
    """
    check_features(rewards=rewards, embeddings=embeddings)
    return centred(jnp.asarray(rewards) + weight * _gains(cosines(embeddings)))


def set_dpp_advantages(
    rewards: Float[Array | np.ndarray, "P N"], embeddings: Float[Array | np.ndarray, "P N D"], scale: float
) -> Float[Array, "P N"]:
    """Gains in the volume of rewarded responses, a determinantal point process of quality and diversity: centred g_i.

    g_i = [log det(I + scale L) - log det(I + scale L without i)] / log(1 + scale), with L_ij = sqrt(r_i r_j) cos_ij, as
    quality enters such a process (Kulesza and Taskar, arXiv 1207.6083). `dqo_advantages` adds reward and diversity;
    here they multiply: an incorrect response gains nothing, a correct one 1 if it is orthogonal to all other correct
    ones. As scale goes to 0, or if all are orthogonal and rewards 0 or 1, it is GRPO.

    No paper that we know has this estimator; it is to DQO what `shaped_product` is to GRPO+DIV.

    Args:
      scale: above 0; the larger, the less a repetition is worth.

    Raises:
      ValueError: on NaN (detected outside jit only); on mismatched shapes.
    """
    check_features(rewards=rewards, embeddings=embeddings)
    quality = jnp.sqrt(jnp.maximum(jnp.asarray(rewards), 0))
    kernel = scale * quality[:, :, None] * quality[:, None, :] * cosines(embeddings)
    return centred(_gains(kernel) / jnp.log1p(scale))


def set_po_advantages(
    rewards: Float[Array | np.ndarray, "P N"], embeddings: Float[Array | np.ndarray, "P N D"], weight: float
) -> Float[Array, "P N"]:
    """SetPO (arXiv 2602.01062): centred r_i + weight g_i, g the gain in the group's diversity.

    g_i = D(all) - D(all without i), D(S) = mean over i in S of -log(1 + mean over j in S of k_ij): the diversity of a
    group whose members are redundant as far as others are like them, with the paper's functional and -log(1 + x).

    k is the cosine, or 0 where that is negative. In the paper D is the mean of g(mean k), for a bounded symmetric k and
    a non-increasing g, and the gain is added to the advantage, not centred; we centre it, as GRPO does rewards. A mean
    over S that includes i itself is that functional of the empirical distribution. The authors' code
    (chenyili0818/SetPO) could not be obtained: their kernel and weight are not confirmed.

    Raises:
      ValueError: on NaN (detected outside jit only); on mismatched shapes.
    """
    _, num_generations = check_features(rewards=rewards, embeddings=embeddings)
    num_others = max(num_generations - 1, 1)
    kernel = jnp.maximum(cosines(embeddings), 0)
    mass = kernel.sum(axis=-1)
    whole = -jnp.log1p(mass / num_generations).mean(axis=-1, keepdims=True)
    without = -jnp.log1p((mass[:, None, :] - kernel) / num_others)  # [P, i that is left out, j]
    itself = jnp.diagonal(without, axis1=1, axis2=2)
    without = (without.sum(axis=-1) - itself) / num_others
    return centred(jnp.asarray(rewards) + weight * (whole - without))


def cosines(embeddings: Float[Array | np.ndarray, "*sets n D"]) -> Float[Array, "*sets n n"]:
    """The cosines between the embeddings of a set; 0 with an embedding that is 0."""
    embeddings = jnp.asarray(embeddings, float)
    lengths = jnp.linalg.norm(embeddings, axis=-1, keepdims=True)
    return _inner_products(embeddings / jnp.where(lengths > 0, lengths, 1))


def log_volume(kernel: Float[Array, "*sets n n"]) -> Float[Array, "*sets"]:
    """log det(I + K) of a positive semi-definite K."""
    factor = jnp.linalg.cholesky(_plus_identity(kernel))
    return 2 * jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).sum(axis=-1)


def _gains(kernel: Float[Array, "P N N"]) -> Float[Array, "P N"]:
    """log det(I + K) - log det(I + K without i), from 0 to log(1 + K_ii)."""
    inverse = jnp.linalg.inv(_plus_identity(kernel))
    own, left = (jnp.diagonal(matrix, axis1=1, axis2=2) for matrix in (kernel, inverse))
    return -jnp.log(jnp.clip(left, 1 / (1 + own), 1))  # its bounds, which rounding may exceed


def _plus_identity(kernel: Float[Array, "*sets n n"]) -> Float[Array, "*sets n n"]:
    return kernel + jnp.broadcast_to(jnp.eye(kernel.shape[-1]), kernel.shape)


def _inner_products(vectors: Float[Array, "*sets n D"]) -> Float[Array, "*sets n n"]:
    return jnp.einsum("...id,...jd->...ij", vectors, vectors, precision="highest")
