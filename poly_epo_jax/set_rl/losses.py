"""Losses, which combine with any advantage estimator (paper appendix).

A loss maps `Tokens` to -sum(weights * term), where the term of a token depends on the loss. The losses of microbatches
therefore add up to the loss of the batch. The metrics are sums over response tokens, which the caller adds up and
divides by the number of tokens. Masked tokens are the tokens with weight 0. Their values have no effect. Parameters
named `clip_low` and `clip_high` are set by `algo.clip_low` and `algo.clip_high`. Other keyword arguments are set by
`algo.loss_options` and checked against their annotations. `clip_cov` and `kl_cov` compare the tokens of a microbatch,
so their result depends on its size.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Bool, Float, Int, Key, Shaped

from poly_epo_jax.registry import Range, Registry
from poly_epo_jax.set_rl.groups import Scalars, as_array, as_features


class Tokens(NamedTuple):
    """Inputs of a loss: arrays of the same shape, rows of T packed tokens.

    The first minibatch of a step is on policy: the current policy is still the old policy, so `logprobs` equals
    `old_logprobs` and all probability ratios are 1. The losses then have the gradient of REINFORCE, except that
    `clip_cov_loss` detaches tokens.

    Attributes:
      logprobs: Log-probabilities under the current policy, in nats.
      old_logprobs: Log-probabilities under the old policy, in nats. The old policy is the policy before the first
        update on the batch.
      advantages: Advantage of the token's sequence.
      weights: Weight of the token in the objective J: `token_weights` for response tokens, optionally times an
        importance weight, and 0 for prompt and padding tokens.
      sequence_ids: Number of the token's sequence within its row, starting at 1, and 0 for padding.
    """

    logprobs: Float[Array, "*rows T"]
    old_logprobs: Float[Array, "*rows T"]
    advantages: Float[Array, "*rows T"]
    weights: Float[Array, "*rows T"]
    sequence_ids: Int[Array, "*rows T"]

    @property
    def is_response(self) -> Bool[Array, "*rows T"]:
        """Mask of the tokens that are trained on."""
        return self.weights > 0

    @property
    def log_ratio(self) -> Float[Array, "*rows T"]:
        """log w, where w is the probability ratio of the current to the old policy, and 0 on masked tokens."""
        return jnp.where(self.is_response, self.logprobs - self.old_logprobs, 0)


LossAndMetrics = tuple[Float[Array, ""], dict[str, Float[Array, ""]]]
Loss = Callable[..., LossAndMetrics]
"""A function `(tokens, **options) -> (loss, metrics)` of `Tokens`: a scalar to minimize, and sums over tokens."""


def ppo_clip_loss(
    tokens: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: Annotated[float, Range(1, 1000, special=0)] = 0.0,
) -> LossAndMetrics:
    """Computes PPO's clipped surrogate: term = min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) (paper appendix, J).

    For a negative advantage, the term is unbounded in w. Dual clip (Ye et al., arXiv 1912.09729) bounds it by
    dual_clip A.

    Args:
      tokens: Tokens of a microbatch.
      clip_low: Lower clip range of the ratio w.
      clip_high: Upper clip range of the ratio w.
      dual_clip: Upper bound of the ratio w for negative advantages. 0 disables the bound.

    Returns:
      The loss, and the sums `clip_fraction` (number of tokens whose gradient a clip removes), `ratio` (w) and `kl`
      (estimates of KL(old policy || current policy), in nats).

    Raises:
      ValueError: If the arrays of `tokens` differ in shape, or are invalid (see `as_array`).
    """
    tokens = _checked(tokens)
    term, held_back, ratio = _clipped(tokens.log_ratio, tokens, clip_low, clip_high)
    if dual_clip:
        is_negative = tokens.advantages < 0
        term = jnp.where(is_negative, jnp.maximum(term, dual_clip * tokens.advantages), term)
        held_back |= is_negative & (ratio > dual_clip)
    return _loss(term, tokens), _ratio_metrics(held_back, tokens, ratio)


def cispo_loss(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossAndMetrics:
    """Computes CISPO's loss: term = stop_gradient(clip(w, 1 - clip_low, 1 + clip_high)) A log p.

    Unlike with `ppo_clip_loss`, every token keeps a gradient.

    Args:
      tokens: Tokens of a microbatch.
      clip_low: Lower clip range of the ratio w.
      clip_high: Upper clip range of the ratio w.

    Returns:
      The loss, and the sums of `ppo_clip_loss`. `clip_fraction` is the number of tokens whose ratio lies outside the
      clip range.

    Raises:
      ValueError: If the arrays of `tokens` differ in shape, or are invalid (see `as_array`).
    """
    tokens = _checked(tokens)
    ratio = jax.lax.stop_gradient(jnp.exp(tokens.log_ratio))
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    term = clipped * tokens.advantages * jnp.where(tokens.is_response, tokens.logprobs, 0)
    return _loss(term, tokens), _ratio_metrics(clipped != ratio, tokens, ratio)


def policy_gradient_loss(tokens: Tokens) -> LossAndMetrics:
    """Computes REINFORCE's loss: term = A log p. With advantage 1 this is maximum likelihood on demonstrations.

    Args:
      tokens: Tokens of a microbatch. `old_logprobs` is not used.

    Returns:
      The loss, and an empty dict of metrics.

    Raises:
      ValueError: If the arrays of `tokens` differ in shape, or are invalid (see `as_array`).
    """
    tokens = _checked(tokens)
    return _loss(tokens.advantages * jnp.where(tokens.is_response, tokens.logprobs, 0), tokens), {}


def gspo_loss(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossAndMetrics:
    """Computes GSPO's loss (Zheng et al., arXiv 2507.18071): PPO's clipped surrogate with one ratio per sequence.

    The ratio s = exp(mean over the sequence's tokens of log w) is the geometric mean of the token ratios. The gradient
    of a token's log-probability uses the weight and advantage of that token, as in the paper's GSPO-token and in verl.
    This equals GSPO if weights and advantages are equal within a sequence. The paper clips to 1 - 3e-4 and 1 + 4e-4.

    Args:
      tokens: Tokens of a microbatch.
      clip_low: Lower clip range of the ratio s.
      clip_high: Upper clip range of the ratio s.

    Returns:
      The loss, and the sums of `ppo_clip_loss`. `ratio` and `clip_fraction` refer to the ratio s of the token's
      sequence.

    Raises:
      ValueError: If the arrays of `tokens` differ in shape, or are invalid (see `as_array`).
    """
    tokens = _checked(tokens)
    log_ratio, stopped = tokens.log_ratio, jax.lax.stop_gradient(tokens.log_ratio)
    term, held_back, ratio = _clipped(
        sequence_means(stopped, tokens) + log_ratio - stopped, tokens, clip_low, clip_high
    )
    return _loss(term, tokens), _ratio_metrics(held_back, tokens, ratio)


def clip_cov_loss(
    tokens: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    cov_fraction: Annotated[float, Range(1e-9, 1)] = 2e-4,
    cov_low: Annotated[float, Range(-1e6, 1e6)] = 1.0,
    cov_high: Annotated[float, Range(-1e6, 1e6)] = 5.0,
) -> LossAndMetrics:
    """Computes the Clip-Cov loss (Cui et al., arXiv 2505.22617), which detaches a few tokens of `ppo_clip_loss`.

    Updates of tokens with a high covariance reduce the entropy of the policy. The covariance of a token is
    cov_t = (A_t - mean A) (log p_t - mean log p), with means over the microbatch's response tokens. The candidates are
    the unclipped tokens with cov_low < cov_t < cov_high. The gradient of a random selection of them is removed.

    The random key is derived from the bits of the log-probabilities, so that equal inputs give equal selections, which
    exact resumption requires. Detached tokens contribute to the value of the loss, as in the paper but not in verl; the
    gradient is the same.

    Args:
      tokens: Tokens of a microbatch.
      clip_low: Lower clip range of the ratio w.
      clip_high: Upper clip range of the ratio w.
      cov_fraction: Number of detached tokens as a fraction of all response tokens; at least one token. If there are
        fewer candidates, all candidates are detached.
      cov_low: Lower bound of the covariance of candidates.
      cov_high: Upper bound of the covariance of candidates.

    Returns:
      The loss, the sums of `ppo_clip_loss`, and the sum `covariance_fraction` (number of detached tokens).

    Raises:
      ValueError: If the arrays of `tokens` differ in shape, or are invalid (see `as_array`).
    """
    tokens = _checked(tokens)
    term, held_back, ratio = _clipped(tokens.log_ratio, tokens, clip_low, clip_high)
    covariances = _covariances(tokens)
    is_candidate = tokens.is_response & ~held_back & (covariances > cov_low) & (covariances < cov_high)
    order = jnp.where(is_candidate, jax.random.uniform(_key_of(tokens), term.shape), -1)
    is_detached = is_candidate & _is_highest(order, _num_selected(cov_fraction, tokens))
    term = jnp.where(is_detached, jax.lax.stop_gradient(term), term)
    return _loss(term, tokens), _ratio_metrics(held_back, tokens, ratio) | {
        "covariance_fraction": jnp.sum(is_detached, dtype=jnp.float32)
    }


def kl_cov_loss(
    tokens: Tokens,
    *,
    cov_fraction: Annotated[float, Range(1e-9, 1)] = 2e-4,
    cov_kl_coef: Annotated[float, Range(0, 1000)] = 1.0,
) -> LossAndMetrics:
    """Computes the KL-Cov loss (Cui et al., arXiv 2505.22617): term = w A, with a penalty |log w| on a few tokens.

    Ratios are not clipped. The penalty applies to the tokens with the largest cov_t (see `clip_cov_loss`). Among
    tokens with equal cov_t, the first are selected.

    Args:
      tokens: Tokens of a microbatch.
      cov_fraction: Number of penalized tokens as a fraction of all response tokens; at least one token.
      cov_kl_coef: Coefficient of the penalty.

    Returns:
      The loss, the sums of `ppo_clip_loss` (with `clip_fraction` 0), and the sum `covariance_fraction` (number of
      penalized tokens).

    Raises:
      ValueError: If the arrays of `tokens` differ in shape, or are invalid (see `as_array`).
    """
    tokens = _checked(tokens)
    ratio = jnp.exp(tokens.log_ratio)
    covariances = jnp.where(tokens.is_response, _covariances(tokens), -jnp.inf)
    is_penalized = tokens.is_response & _is_highest(covariances, _num_selected(cov_fraction, tokens))
    # The gradient of this form of abs is 0 at 0; the gradient of jnp.abs would be 1.
    distance = jnp.maximum(tokens.log_ratio, -tokens.log_ratio)
    term = ratio * tokens.advantages - jnp.where(is_penalized, cov_kl_coef * distance, 0)
    return _loss(term, tokens), _ratio_metrics(jnp.zeros_like(is_penalized), tokens, ratio) | {
        "covariance_fraction": jnp.sum(is_penalized, dtype=jnp.float32)
    }


LOSSES: Registry[Loss] = Registry(
    ppo_clip=ppo_clip_loss,
    cispo=cispo_loss,
    policy_gradient=policy_gradient_loss,
    gspo=gspo_loss,
    clip_cov=clip_cov_loss,
    kl_cov=kl_cov_loss,
)
"""Losses by the name that `algo.loss` selects. A configuration file can register further losses."""

ZERO_GRADIENT_AT_ZERO_ADVANTAGE = {"ppo_clip", "cispo", "policy_gradient", "gspo"}
"""Losses whose value and gradient do not depend on sequences with advantage 0, so that updates can skip the backward
pass of these sequences. `clip_cov` and `kl_cov` are excluded because they compare tokens of different sequences."""


def token_weights(
    lengths: Scalars, length_normalization: str, max_length: int, num_generations: Sequence[int] | None = None
) -> Float[Array, "P N"]:
    """Computes the weight 1 / (P N T_i) of each response token in J (paper appendix, Implementation Details).

    With "own" (GRPO), T_i is the length |y_i| of the response. All responses then have the same total weight, so a
    token of a long response has a smaller weight than a token of a short one. With "max" (Poly-EPO), T_i is
    `max_length`. All tokens then have the same weight, so long responses have a larger total weight. With "token"
    (DAPO), T_i is the mean length, so J is the mean over all response tokens: each weight is 1 / sum_j |y_j|. The total
    weight is then 1 regardless of the lengths.

    Args:
      lengths: Number of response tokens |y_i| of each generation. 0 for responses that are not trained on, which still
        count in P N.
      length_normalization: "own", "max" or "token".
      max_length: Maximum length of a response, in tokens.
      num_generations: Number of generations of each prompt, which replaces N, if rows end with lengths of 0 that do not
        count. If None, all N count.

    Returns:
      Weight of each token of a generation, [P, N].

    Raises:
      ValueError: If `length_normalization` is unknown, or `lengths` is invalid (see `as_features`).
    """
    (lengths,) = as_features(lengths=lengths)
    counts = [lengths.shape[1]] if num_generations is None else num_generations
    sizes = float(len(lengths)) * jnp.asarray(counts)[:, None]  # int32 would overflow at 2^31 tokens
    divisors = {
        "own": jnp.maximum(lengths, 1),
        "max": jnp.full(lengths.shape, max_length),
        "token": jnp.full(lengths.shape, jnp.maximum(lengths.sum(), 1)) / sizes,
    }
    if length_normalization not in divisors:
        raise ValueError(f'length_normalization is "{length_normalization}", but must be "own", "max" or "token".')
    return 1 / (sizes * divisors[length_normalization])


def sequence_means(values: Shaped[Array, "*rows T"], tokens: Tokens) -> Float[Array, "*rows T"]:
    """Averages values over the response tokens of each sequence.

    Args:
      values: Values of the tokens.
      tokens: Tokens that define the sequences and the mask.

    Returns:
      The mean over its sequence at each response token, and 0 on masked tokens.

    Raises:
      ValueError: If `values` cannot be converted to numbers, or if the arrays of `tokens` differ in shape or are
        invalid (see `as_array`).
    """
    values, tokens = as_array("values", values, False), _checked(tokens)
    length = values.shape[-1]

    def of_row(values: Array, ids: Array, is_response: Array) -> Array:
        def total(of_token: Array) -> Array:
            return jax.ops.segment_sum(jnp.where(is_response, of_token, 0.0), ids, length + 1)[ids]

        return jnp.where(is_response, total(values) / jnp.maximum(total(jnp.ones_like(values)), 1), 0)

    flat = (array.reshape(-1, length) for array in (values, tokens.sequence_ids, tokens.is_response))
    return jax.vmap(of_row)(*flat).reshape(values.shape)


def kl_estimate(log_ratio: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """Returns the k3 estimate of KL(p || q), in nats, from log_ratio = log q - log p of tokens drawn from p.

    The estimate q / p - 1 - log(q / p) is unbiased and never negative (Schulman, "Approximating KL divergence").

    Raises:
      ValueError: If `log_ratio` is invalid (see `as_array`).
    """
    log_ratio = as_array("log_ratio", log_ratio)
    return jnp.expm1(log_ratio) - log_ratio


def _clipped(log_ratio: Array, tokens: Tokens, clip_low: float, clip_high: float) -> tuple[Array, Array, Array]:
    """Returns the terms of PPO's clipped surrogate, a mask of the clipped tokens, and the ratios."""
    ratio, advantages = jnp.exp(log_ratio), tokens.advantages
    term = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages)
    held_back = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    return term, held_back, ratio


def _covariances(tokens: Tokens) -> Array:
    """Returns (A - mean A) (log p - mean log p), with means over all response tokens, and 0 on masked tokens.

    No gradient flows through the result.
    """
    count = jnp.maximum(tokens.is_response.sum(), 1)

    def above_mean(values: Array) -> Array:
        values = jnp.where(tokens.is_response, values, 0)
        return jnp.where(tokens.is_response, values - values.sum() / count, 0)

    return jax.lax.stop_gradient(above_mean(tokens.advantages) * above_mean(tokens.logprobs))


def _num_selected(fraction: float, tokens: Tokens) -> Int[Array, ""]:
    """Returns the given fraction of the number of response tokens, rounded down, but at least 1."""
    return jnp.maximum(jnp.floor(fraction * tokens.is_response.sum()), 1).astype(int)


def _is_highest(scores: Float[Array, "*rows T"], count: Int[Array, ""]) -> Bool[Array, "*rows T"]:
    """Returns a mask of exactly `count` tokens with the highest scores."""
    order = jnp.argsort(-scores.ravel())  # stable
    return jnp.zeros(scores.size, bool).at[order].set(jnp.arange(scores.size) < count).reshape(scores.shape)


def _key_of(tokens: Tokens) -> Key[Array, ""]:
    """Derives a random key from the log-probabilities, by summing their bit patterns."""
    logprobs = jnp.where(tokens.is_response, jax.lax.stop_gradient(tokens.logprobs), 0).astype(jnp.float32)
    return jax.random.key(jnp.sum(jax.lax.bitcast_convert_type(logprobs, jnp.uint32), dtype=jnp.uint32))


def _loss(term: Array, tokens: Tokens) -> Array:
    return -jnp.sum(jnp.where(tokens.is_response, tokens.weights * term, 0))


def _ratio_metrics(clipped: Bool[Array, "*rows T"], tokens: Tokens, ratio: Array) -> dict[str, Array]:
    sums = {"clip_fraction": clipped, "ratio": ratio, "kl": kl_estimate(tokens.log_ratio)}
    return {name: jnp.sum(jnp.where(tokens.is_response, value, 0.0)) for name, value in sums.items()}


def _checked(tokens: Tokens) -> Tokens:
    """Converts the arrays of tokens and checks them, except for values of masked tokens."""
    shapes = {name: np.shape(array) for name, array in tokens._asdict().items()}
    if len(set(shapes.values())) != 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"The arrays of Tokens must share one shape, but have {listed}.")
    weights = as_array("weights", tokens.weights)
    is_response = False if isinstance(weights, Tracer) else np.asarray(weights) > 0
    return Tokens(*(as_array(name, array, is_response) for name, array in tokens._asdict().items()))
