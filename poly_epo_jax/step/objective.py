"""The objective of an update, as pure functions of one microbatch: policy loss, KL and entropy terms, and metrics.

Metrics are sums, so that they can be added over microbatches, except for the maximum `mismatch_max`. `summarize`
combines them into the metrics of a step.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.set_rl import Loss, Tokens, kl_estimate, sequence_means
from poly_epo_jax.set_rl.groups import described
from poly_epo_jax.step.packing import PackedBatch
from poly_epo_jax.types import Metrics

DeviceMetrics = dict[str, jax.Array]

UPDATE_METRICS = {
    *("loss", "entropy", "reference_kl", "tokens", "padding", "places", "truncated", "masked", "expert_load"),
    *("mismatch", "mismatch_kl", "mismatch_tokens", "mismatch_max"),
    *("gradient_norm", "update_norm", "weight_norm", "learning_rate"),
}
"""Names of the metrics that updates compute for any loss. Losses must not return metrics with these names."""


class DivergenceError(RuntimeError):
    """Raised when an update reads or produces non-finite values. The resulting weights must not be used."""


@dataclasses.dataclass(frozen=True)
class UpdateObjective:
    """The objective of an update: a policy loss, optional KL and entropy terms, and corrections for the sampler.

    Probability ratios are relative to the old policy, which is the policy before the first update of the step as the
    trainer computes it. The sampler's policy differs from it in numerics, or is older if batches are generated ahead.
    Two optional corrections account for the difference. Truncated importance sampling multiplies the weight of a token
    by min(p_old / p_sampler, `importance_cap`). Masking removes responses with a large mismatch from all terms.

    With `rollouts.in_flight`, the tokens of a response can be sampled with several versions of the weights. The
    recorded log-probability of a token is that of the version that sampled it, given all previous tokens of the
    response. Neither the ratios nor the corrections depend on the versions: p_old is the same policy for all tokens,
    and p_old / p_sampler is the exact importance weight of each token, regardless of the version of its neighbors.

    Attributes:
      loss: One of set_rl.LOSSES, with its keyword arguments bound.
      temperature: Temperature of the sampling distribution whose log-probabilities are trained.
      kl_coef: Weight of KL(policy || reference). 0 disables the term.
      entropy_coef: Weight of the entropy bonus. 0 disables it.
      importance_cap: Cap of truncated importance sampling. 0 disables truncated importance sampling.
      max_mismatch_ratio: Responses are masked if the geometric mean of p_old / p_sampler over their tokens is above
        `max_mismatch_ratio` or below 1 / `max_mismatch_ratio`. 0 disables masking.
    """

    loss: Loss
    temperature: float = 1.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance_cap: float = 0.0
    max_mismatch_ratio: float = 0.0

    def __call__(
        self, logprobs: Float[Array, "R T"], entropy: Float[Array, "R T"], batch: PackedBatch
    ) -> tuple[Float[Array, ""], DeviceMetrics]:
        """Computes the loss of a microbatch with R rows of T tokens, and its metrics.

        Args:
          logprobs: Log-probabilities [R, T] of the target tokens under the current policy, in nats.
          entropy: Entropies [R, T] of its next-token distributions, in nats.
          batch: The packed sequences.

        Returns:
          The loss, and the metrics of the microbatch as sums, except for the maximum `mismatch_max`.

        Raises:
          ConfigError: If the result of the loss function is invalid, see `checked_loss`.
        """
        # In the first minibatch of a step, the current policy is the old policy. Ratios are exactly 1, and old
        # log-probabilities do not require a separate forward pass.
        old_logprobs = jnp.where(batch.on_policy, jax.lax.stop_gradient(logprobs), batch.old_logprobs)
        generated = Tokens(
            logprobs, old_logprobs, *map(jnp.asarray, (batch.advantages, batch.weights, batch.segment_ids))
        )
        difference = jnp.where(generated.is_response, old_logprobs - batch.sampler_logprobs, 0.0)
        tokens, corrections = self._corrected(generated, difference)
        total, metrics = checked_loss(self.loss(tokens), "The function of algo.loss")
        if self.kl_coef:
            kl = kl_estimate(jnp.where(tokens.is_response, batch.reference_logprobs - logprobs, 0.0))
            total += self.kl_coef * jnp.sum(tokens.weights * kl)
            metrics["reference_kl"] = jnp.sum(kl)
        if self.entropy_coef:
            total -= self.entropy_coef * jnp.sum(tokens.weights * entropy)
        metrics |= corrections | {
            "mismatch": jnp.sum(jnp.abs(difference)),
            "mismatch_kl": jnp.sum(kl_estimate(difference)),  # estimates KL(sampler || trainer)
            "mismatch_tokens": jnp.sum(generated.is_response),
            "mismatch_max": jnp.max(jnp.abs(difference)),
            "entropy": jnp.sum(jnp.where(tokens.is_response, entropy, 0.0)),
            "tokens": jnp.sum(tokens.is_response),
            "padding": jnp.sum(batch.segment_ids == 0),
            "places": jnp.asarray(batch.segment_ids.size),
            "loss": total,
        }
        return total, metrics

    def _corrected(self, tokens: Tokens, difference: Float[Array, "R T"]) -> tuple[Tokens, DeviceMetrics]:
        """Corrects the token weights, and counts truncated tokens and masked responses.

        Args:
          tokens: The tokens of a microbatch.
          difference: log(p_old / p_sampler) of each response token, and 0 elsewhere.
        """
        weights, counts = tokens.weights, {}
        if self.importance_cap:
            ratio = jnp.exp(difference)
            weights *= jnp.minimum(ratio, self.importance_cap)
            counts["truncated"] = jnp.sum(tokens.is_response & (ratio > self.importance_cap))
        if self.max_mismatch_ratio:
            is_masked = jnp.abs(sequence_means(difference, tokens)) > math.log(self.max_mismatch_ratio)
            weights = jnp.where(is_masked, 0.0, weights)
            counts["masked"] = jnp.sum(jax.vmap(_num_segments)(is_masked, tokens.sequence_ids))
        return tokens._replace(weights=weights), counts


def checked_loss(returned: Any, subject: str) -> tuple[Any, dict[str, Any]]:
    """Validates the result of a loss function, and returns the loss and a copy of the metrics.

    Args:
      returned: The result.
      subject: Name of the function in error messages.

    Raises:
      ConfigError: If the result is not a scalar and a dictionary of scalars, or a metric has a reserved name.
    """
    match returned:
        case total, dict(metrics) if all(isinstance(name, str) for name in metrics):
            values = {"the loss": total, **metrics}
        case _:
            raise ConfigError(
                f"{subject} must return a scalar and a dictionary of metrics by name, but returned "
                f"{described(returned)}; end it with return loss, metrics, where metrics may be {{}}."
            )
    for name, value in values.items():
        if not isinstance(value, int | float) and getattr(value, "shape", None) != ():
            raise ConfigError(
                f"{subject} must return scalars, but {name} is {described(value)}; sum arrays over the tokens."
            )
    if taken := UPDATE_METRICS & metrics.keys():
        raise ConfigError(
            f"{subject} returned {min(taken)!r}, which is the name of another metric; choose another name."
        )
    return total, dict(metrics)


def _num_segments(of_token: Bool[Array, " T"], ids: Int[Array, " T"]) -> Int[Array, ""]:
    """Returns the number of sequences of a row with at least one token for which `of_token` is True."""
    return jnp.sum(jnp.zeros(len(ids) + 1, bool).at[ids].max(of_token))


def summarize(sums: Sequence[dict[str, Any]], applied: Sequence[dict[str, Any]]) -> Metrics:
    """Combines the metrics of the microbatches and updates of a step.

    Most sums become means over trained tokens. `mismatch/mean`, `mismatch/kl` and `mismatch/truncated_fraction` are
    means over all response tokens, including masked responses. The loss, the norms and the learning rate become means
    over updates.

    Args:
      sums: Metrics of each microbatch, from `UpdateObjective`.
      applied: Metrics of each optimizer update.

    Returns:
      The metrics of the step. Empty if no update was applied.
    """
    if not applied:
        return {}
    total = {name: float(sum(float(metrics[name]) for metrics in sums)) for name in sums[0]}
    tokens, generated = max(total.pop("tokens"), 1.0), max(total.pop("mismatch_tokens"), 1.0)
    mismatch = {
        "mismatch/mean": total.pop("mismatch") / generated,
        "mismatch/max": max(float(metrics["mismatch_max"]) for metrics in sums),
        "mismatch/kl": total.pop("mismatch_kl") / generated,
    }
    total.pop("mismatch_max")
    if "truncated" in total:
        mismatch["mismatch/truncated_fraction"] = total.pop("truncated") / generated  # fraction of tokens
    if "masked" in total:
        mismatch["mismatch/masked_responses"] = total.pop("masked")  # number of responses
    padding, loss = total.pop("padding") / total.pop("places"), total.pop("loss")
    return (
        {f"policy/{name}": value / tokens for name, value in total.items()}
        | {f"policy/{name}": float(sum(float(m[name]) for m in applied)) / len(applied) for name in applied[0]}
        | {"policy/loss": loss / len(applied), "packing/padding_fraction": padding}  # fraction of the packed positions
        | mismatch
    )


def check_finite(metrics: Metrics, where: str) -> None:
    """Verifies the metrics of an update before it is logged or saved. They include the norm of the new weights.

    Args:
      metrics: Metrics of the update, from `summarize`.
      where: Description of the update, the subject of the error message.

    Raises:
      DivergenceError: If a metric is not finite.
    """
    if non_finite := [f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value)]:
        raise DivergenceError(f"{where} produced non-finite metrics: {', '.join(non_finite)}")
