"""The update rules that accept any advantage: per-token terms in, a scalar loss and metrics out (paper appendix).

A loss reads `Tokens` and returns -sum(weights * term), so that the losses of microbatches add up to the loss of the
batch; its metrics are sums over response tokens, to be added up and divided by the token count. The values of masked
tokens never matter. Losses with parameters `clip_low` and `clip_high` receive the keys `algo.clip_low` and
`algo.clip_high`; other keyword arguments are `algo.loss_options`, which are checked against the loss's annotations.
`clip_cov` and `kl_cov` compare a token with the others of its microbatch, and so depend on the microbatch's size.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Key, Shaped

from poly_epo_jax.config.checks import Range
from poly_epo_jax.types import Registry


class Tokens(NamedTuple):
    """What a loss reads for each token: arrays of one shape, rows of T tokens.

    `old_logprobs` are those of the policy that generated the token. `weights` is the token's share of the objective J,
    from `token_weights` on response tokens and 0 on prompt and padding tokens. `sequence_ids` tells a row's sequences
    apart: counted from 1, with 0 for padding.
    """

    logprobs: Float[Array, "*rows T"]
    old_logprobs: Float[Array, "*rows T"]
    advantages: Float[Array, "*rows T"]
    weights: Float[Array, "*rows T"]
    sequence_ids: Int[Array, "*rows T"]

    @property
    def is_response(self) -> Bool[Array, "*rows T"]:
        """Whether the token is trained."""
        return self.weights > 0

    @property
    def log_ratio(self) -> Float[Array, "*rows T"]:
        """log w, where w is a token's probability ratio to the policy that generated it; 0 on masked tokens."""
        return jnp.where(self.is_response, self.logprobs - self.old_logprobs, 0)


LossAndMetrics = tuple[Float[Array, ""], dict[str, Float[Array, ""]]]
Loss = Callable[..., LossAndMetrics]


def ppo_clip_loss(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossAndMetrics:
    """PPO's clipped surrogate: term = min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) (paper appendix, J).

    Returns:
      The loss, and the sums `clip_fraction` (tokens that the clip holds back), `ratio` (w) and `kl` (estimates of
      KL(old || new), in nats).

    Raises:
      ValueError: on mismatched shapes.
    """
    _check_shapes(tokens)
    term, held_back, ratio = _clipped(tokens.log_ratio, tokens, clip_low, clip_high)
    return _loss(term, tokens), _ratio_metrics(held_back, tokens, ratio)


def cispo_loss(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossAndMetrics:
    """CISPO: term = stop_gradient(clip(w, 1 - clip_low, 1 + clip_high)) A log-prob. Every token keeps a gradient.

    Returns:
      As `ppo_clip_loss`; here `clip_fraction` counts the tokens whose ratio lies outside the interval.

    Raises:
      ValueError: on mismatched shapes.
    """
    _check_shapes(tokens)
    ratio = jax.lax.stop_gradient(jnp.exp(tokens.log_ratio))
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    term = clipped * tokens.advantages * jnp.where(tokens.is_response, tokens.logprobs, 0)
    return _loss(term, tokens), _ratio_metrics(clipped != ratio, tokens, ratio)


def policy_gradient_loss(tokens: Tokens) -> LossAndMetrics:
    """REINFORCE: term = A log-prob. With advantage 1 it is maximum likelihood, to fit demonstrations.

    Returns:
      The loss, and no metrics: `old_logprobs` is not read, so there is no ratio.

    Raises:
      ValueError: on mismatched shapes.
    """
    _check_shapes(tokens)
    return _loss(tokens.advantages * jnp.where(tokens.is_response, tokens.logprobs, 0), tokens), {}


def gspo_loss(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossAndMetrics:
    """GSPO (Zheng et al., arXiv 2507.18071): PPO's clipped surrogate with one ratio for each sequence.

    The ratio is s = exp(mean over the sequence's tokens of log w), the geometric mean of theirs. Each token's log-prob
    gets its gradient from that token's own weight and advantage, as in the paper's GSPO-token and in verl; this is the
    same if they are equal within a sequence. The paper clips to 1 - 3e-4 and 1 + 4e-4.

    Returns:
      As `ppo_clip_loss`; here `ratio` and `clip_fraction` are those of the token's sequence.

    Raises:
      ValueError: on mismatched shapes.
    """
    _check_shapes(tokens)
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
    """Clip-Cov (Cui et al., arXiv 2505.22617): `ppo_clip_loss` without the gradient of a few tokens that cost entropy.

    cov_t = (A_t - mean A) (log p_t - mean log p) over the microbatch's response tokens. Of those with cov_t between
    cov_low and cov_high that the clip lets through, a random `cov_fraction` of all tokens, at least one, is detached.

    verl draws exactly that number; here each candidate is drawn independently, with the chance that gives this number
    on average, from bits of the log-probabilities: equal inputs give equal draws, as resuming requires. Detached tokens
    count in the loss's value here, as in the paper but not in verl; the gradient is the same.

    Returns:
      As `ppo_clip_loss`, and `covariance_fraction`, the tokens that were detached.

    Raises:
      ValueError: on mismatched shapes.
    """
    _check_shapes(tokens)
    term, held_back, ratio = _clipped(tokens.log_ratio, tokens, clip_low, clip_high)
    covariances = _covariances(tokens)
    is_candidate = tokens.is_response & ~held_back & (covariances > cov_low) & (covariances < cov_high)
    chance = _few(cov_fraction, tokens) / jnp.maximum(is_candidate.sum(), 1)
    is_detached = is_candidate & (jax.random.uniform(_key_of(tokens), term.shape) < chance)
    term = jnp.where(is_detached, jax.lax.stop_gradient(term), term)
    metrics = _ratio_metrics(held_back, tokens, ratio)
    return _loss(term, tokens), metrics | {"covariance_fraction": jnp.sum(is_detached, dtype=jnp.float32)}


def kl_cov_loss(
    tokens: Tokens,
    *,
    cov_fraction: Annotated[float, Range(1e-9, 1)] = 2e-4,
    cov_kl_coef: Annotated[float, Range(0, 1000)] = 1.0,
) -> LossAndMetrics:
    """KL-Cov (Cui et al., arXiv 2505.22617): w A without a clip, and a penalty |log w| on a few tokens.

    The penalty, times `cov_kl_coef`, applies to the `cov_fraction` of tokens, at least one, with the largest cov_t (see
    `clip_cov_loss`), and to those that tie with the last of them, as in verl.

    Returns:
      As `ppo_clip_loss`; here nothing is clipped, and `covariance_fraction` counts the tokens that are penalised.

    Raises:
      ValueError: on mismatched shapes.
    """
    _check_shapes(tokens)
    ratio = jnp.exp(tokens.log_ratio)
    covariances = jnp.where(tokens.is_response, _covariances(tokens), -jnp.inf)
    ascending = jnp.sort(covariances.ravel())
    is_penalised = tokens.is_response & (covariances >= ascending[-_few(cov_fraction, tokens)])
    distance = jnp.maximum(tokens.log_ratio, -tokens.log_ratio)  # whose gradient is 0 at 0, where that of abs is 1
    term = ratio * tokens.advantages - jnp.where(is_penalised, cov_kl_coef * distance, 0)
    metrics = _ratio_metrics(jnp.zeros_like(is_penalised), tokens, ratio)
    return _loss(term, tokens), metrics | {"covariance_fraction": jnp.sum(is_penalised, dtype=jnp.float32)}


LOSSES: Registry[Loss] = Registry(
    ppo_clip=ppo_clip_loss,
    cispo=cispo_loss,
    policy_gradient=policy_gradient_loss,
    gspo=gspo_loss,
    clip_cov=clip_cov_loss,
    kl_cov=kl_cov_loss,
)

SILENT_AT_ZERO = {"ppo_clip", "cispo", "policy_gradient", "gspo"}
"""Losses to which a sequence of advantage 0 adds nothing, neither to their value nor to any gradient, so that the
update need not compute its gradient. `clip_cov` and `kl_cov` compare a token with those of other sequences."""


def token_weights(
    lengths: Int[Array | np.ndarray, "P N"], length_normalization: str, max_length: int
) -> Float[Array, "P N"]:
    """Share of each of a generation's response tokens in J: 1 / (P N T_i) (paper appendix, Implementation Details).

    T_i is |y_i| for "own" (GRPO: every generation weighs the same) and `max_length` for "max" (Poly-EPO: every token
    weighs the same).

    Args:
      lengths: response tokens |y_i| of each generation.
      length_normalization: "own" or "max".
      max_length: the longest response that sampling allows, in tokens.

    Raises:
      ValueError: on another `length_normalization`.
    """
    if length_normalization == "own":
        divisors = jnp.maximum(lengths, 1)
    elif length_normalization == "max":
        divisors = jnp.full(lengths.shape, max_length)
    else:
        raise ValueError(f'length_normalization is "{length_normalization}", but must be "own" or "max".')
    return 1 / (float(lengths.size) * divisors)  # int32 would overflow at 2^31 tokens


def sequence_means(values: Shaped[Array, "*rows T"], tokens: Tokens) -> Float[Array, "*rows T"]:
    """At each response token, the mean of `values` over the response tokens of its sequence; 0 on masked tokens."""
    length = values.shape[-1]

    def of_row(values: Array, ids: Array, is_response: Array) -> Array:
        def total(of_token: Array) -> Array:
            return jax.ops.segment_sum(jnp.where(is_response, of_token, 0.0), ids, length + 1)[ids]

        return jnp.where(is_response, total(values) / jnp.maximum(total(jnp.ones_like(values)), 1), 0)

    rows = (values, tokens.sequence_ids, tokens.is_response)
    flat = (array.reshape(-1, length) for array in rows)
    return jax.vmap(of_row)(*flat).reshape(values.shape)


def kl_estimate(log_ratio: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """The k3 estimate of KL(p || q) from log_ratio = log q - log p of a token drawn from p, in nats.

    q / p - 1 - log(q / p): unbiased, and never negative (Schulman, "Approximating KL divergence").
    """
    return jnp.expm1(log_ratio) - log_ratio


def _clipped(log_ratio: Array, tokens: Tokens, clip_low: float, clip_high: float) -> tuple[Array, Array, Array]:
    """PPO's clipped surrogate of these ratios: the term, whether the clip holds it back, and the ratio."""
    ratio, advantages = jnp.exp(log_ratio), tokens.advantages
    term = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages)
    held_back = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    return term, held_back, ratio


def _covariances(tokens: Tokens) -> Array:
    """(A - mean A) (log p - mean log p), means over all response tokens; without a gradient, 0 on masked tokens."""
    count = jnp.maximum(tokens.is_response.sum(), 1)

    def above_mean(values: Array) -> Array:
        values = jnp.where(tokens.is_response, values, 0)
        return jnp.where(tokens.is_response, values - values.sum() / count, 0)

    return jax.lax.stop_gradient(above_mean(tokens.advantages) * above_mean(tokens.logprobs))


def _few(fraction: float, tokens: Tokens) -> Int[Array, ""]:
    """This fraction of all response tokens, at least one."""
    return jnp.maximum(jnp.floor(fraction * tokens.is_response.sum()), 1).astype(int)


def _key_of(tokens: Tokens) -> Key[Array, ""]:
    """A random key made from the log-probabilities: the sum of their bits."""
    logprobs = jnp.where(tokens.is_response, jax.lax.stop_gradient(tokens.logprobs), 0).astype(jnp.float32)
    return jax.random.key(jnp.sum(jax.lax.bitcast_convert_type(logprobs, jnp.uint32), dtype=jnp.uint32))


def _loss(term: Array, tokens: Tokens) -> Array:
    return -jnp.sum(tokens.weights * term)


def _ratio_metrics(clipped: Bool[Array, "*rows T"], tokens: Tokens, ratio: Array) -> dict[str, Array]:
    sums = {"clip_fraction": clipped, "ratio": ratio, "kl": kl_estimate(tokens.log_ratio)}
    return {name: jnp.sum(jnp.where(tokens.is_response, value, 0.0)) for name, value in sums.items()}


def _check_shapes(tokens: Tokens) -> None:
    shapes = {name: array.shape for name, array in tokens._asdict().items()}
    if len(set(shapes.values())) != 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"The arrays of Tokens must share one shape, but have {listed}.")
