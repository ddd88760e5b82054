"""The update rules that accept any advantage: per-token terms in, a scalar loss and metrics out (paper appendix).

All token arrays of a call have one shape, whichever. `weights` is each token's share of the objective J, from
`token_weights` on response tokens and 0 on prompt and padding tokens, so that loss = -sum(weights * term) and the
losses of microbatches add up to the loss of the batch. Metrics are sums over response tokens, to be added up and
divided by the token count. What masked tokens hold never matters.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

Tokens = Float[Array, "*tokens"]
LossAndMetrics = tuple[Float[Array, ""], dict[str, Float[Array, ""]]]
Loss = Callable[..., LossAndMetrics]
"""(logprobs, old_logprobs, advantages, weights) -> (loss, sums of metrics over tokens)."""


def ppo_clip_loss(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    weights: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> LossAndMetrics:
    """PPO's clipped surrogate: term = min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) (paper appendix, J).

    w = exp(logprobs - old_logprobs) is a token's probability ratio to the policy that generated it.

    Returns:
      The loss, and the sums `clip_fraction` (tokens that the clip holds back), `ratio` (w) and `kl` (estimates of
      KL(old || new), each w - 1 - log w >= 0, in nats).

    Raises:
      ValueError: on mismatched shapes.
    """
    _check_shapes(logprobs, old_logprobs, advantages, weights)
    is_response = weights > 0
    log_ratio = jnp.where(is_response, logprobs - old_logprobs, 0)
    ratio = jnp.exp(log_ratio)
    term = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages)
    held_back = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    return _loss(term, weights), _ratio_metrics(held_back, log_ratio, ratio, is_response)


def cispo_loss(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    weights: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> LossAndMetrics:
    """CISPO: term = stop_gradient(clip(w, 1 - clip_low, 1 + clip_high)) A log-prob. Every token keeps a gradient.

    Returns:
      As `ppo_clip_loss`; here `clip_fraction` counts the tokens whose ratio lies outside the interval.

    Raises:
      ValueError: on mismatched shapes.
    """
    _check_shapes(logprobs, old_logprobs, advantages, weights)
    is_response = weights > 0
    log_ratio = jax.lax.stop_gradient(jnp.where(is_response, logprobs - old_logprobs, 0))
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    term = clipped * advantages * jnp.where(is_response, logprobs, 0)
    return _loss(term, weights), _ratio_metrics(clipped != ratio, log_ratio, ratio, is_response)


def policy_gradient_loss(logprobs: Tokens, old_logprobs: Tokens, advantages: Tokens, weights: Tokens) -> LossAndMetrics:
    """REINFORCE: term = A log-prob. With advantage 1 it is maximum likelihood, to fit demonstrations.

    Returns:
      The loss, and no metrics: `old_logprobs` is not read, so there is no ratio.

    Raises:
      ValueError: on mismatched shapes.
    """
    _check_shapes(logprobs, old_logprobs, advantages, weights)
    return _loss(advantages * jnp.where(weights > 0, logprobs, 0), weights), {}


LOSSES: dict[str, Loss] = {
    "ppo_clip": ppo_clip_loss,
    "cispo": cispo_loss,
    "policy_gradient": policy_gradient_loss,
}


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
    return 1 / (lengths.size * divisors)


def _loss(term: Array, weights: Tokens) -> Array:
    return -jnp.sum(weights * term)


def _ratio_metrics(
    clipped: Bool[Array, "*tokens"], log_ratio: Array, ratio: Array, is_response: Bool[Array, "*tokens"]
) -> dict[str, Array]:
    sums = {"clip_fraction": clipped, "ratio": ratio, "kl": ratio - 1 - log_ratio}
    return {name: jnp.sum(jnp.where(is_response, value, 0.0)) for name, value in sums.items()}


def _check_shapes(logprobs: Array, old_logprobs: Array, advantages: Array, weights: Array) -> None:
    shapes = [array.shape for array in (logprobs, old_logprobs, advantages, weights)]
    if len(set(shapes)) != 1:
        raise ValueError(
            "logprobs, old_logprobs, advantages and weights must share one shape, but have "
            f"{', '.join(map(str, shapes))}."
        )
