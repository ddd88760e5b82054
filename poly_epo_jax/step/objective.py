"""What an update minimises, as pure functions of one microbatch: J's loss, the KL and entropy terms, and their metrics.

Metrics are sums over response tokens, so that they add up over microbatches; `summarize` turns them into means.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from poly_epo_jax.set_rl import Loss, Tokens, kl_estimate, sequence_means
from poly_epo_jax.step.packing import PackedBatch
from poly_epo_jax.types import Metrics

DeviceMetrics = dict[str, jax.Array]


class DivergenceError(RuntimeError):
    """An update started from or produced numbers that are not finite, so its weights are worthless."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """The update's objective: `loss`, one of set_rl.LOSSES with its keywords bound, and the terms added to it.

    Probability ratios are relative to the policy before the step's first update, as the trainer computes it: `old`. The
    policy that the sampler generated with differs from it in arithmetic, or is older. Two optional corrections account
    for this: a token's weight is multiplied by min(p_old / p_sampler, cap), and a response that is too unlikely to be
    one of the policy's own is masked in all terms of the objective.

    Args:
      temperature: of the sampling distribution whose log-probabilities are trained.
      kl_coef, entropy_coef: weights of KL(policy || reference) and of the entropy bonus.
      importance_cap: the cap (truncated importance sampling); 0: no such weights.
      max_mismatch: responses are masked if the geometric mean of p_old / p_sampler over their tokens is above this, or
        below 1 / this; 0: none are.
    """

    loss: Loss
    temperature: float = 1.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance_cap: float = 0.0
    max_mismatch: float = 0.0

    def __call__(
        self, logprobs: Float[Array, "R T"], entropy: Float[Array, "R T"], batch: PackedBatch
    ) -> tuple[Float[Array, ""], DeviceMetrics]:
        """The microbatch's loss and sums of metrics, from the current policy's log-probabilities and entropies."""
        old_logprobs = jnp.where(batch.on_policy, jax.lax.stop_gradient(logprobs), batch.old_logprobs)
        generated = Tokens(
            logprobs, old_logprobs, *map(jnp.asarray, (batch.advantages, batch.weights, batch.segment_ids))
        )
        difference = jnp.where(generated.is_response, old_logprobs - batch.sampler_logprobs, 0.0)
        tokens, corrections = self._corrected(generated, difference)
        total, metrics = self.loss(tokens)
        if self.kl_coef:
            kl = kl_estimate(jnp.where(tokens.is_response, batch.reference_logprobs - logprobs, 0.0))
            total += self.kl_coef * jnp.sum(tokens.weights * kl)
            metrics["reference_kl"] = jnp.sum(kl)
        if self.entropy_coef:
            total -= self.entropy_coef * jnp.sum(tokens.weights * entropy)
        metrics |= _mismatch(difference, generated.is_response) | corrections
        metrics |= {
            "entropy": jnp.sum(jnp.where(tokens.is_response, entropy, 0.0)),
            "tokens": jnp.sum(tokens.is_response),
            "padding": jnp.sum(batch.segment_ids == 0),
            "places": jnp.asarray(batch.segment_ids.size),
            "loss": total,
        }
        return total, metrics

    def _corrected(self, tokens: Tokens, difference: Float[Array, "R T"]) -> tuple[Tokens, DeviceMetrics]:
        """The tokens with corrected weights, and counts of what was truncated and masked.

        Args:
          difference: log(p_old / p_sampler) of response tokens.
        """
        weights, counts = tokens.weights, {}
        if self.importance_cap:
            ratio = jnp.exp(difference)
            weights *= jnp.minimum(ratio, self.importance_cap)
            counts["truncated"] = jnp.sum(tokens.is_response & (ratio > self.importance_cap))
        if self.max_mismatch:
            is_masked = jnp.abs(sequence_means(difference, tokens)) > math.log(self.max_mismatch)
            weights = jnp.where(is_masked, 0.0, weights)
            counts["masked"] = jnp.sum(jax.vmap(_num_segments)(is_masked, tokens.sequence_ids))
        return tokens._replace(weights=weights), counts


def _num_segments(of_token: Bool[Array, " T"], ids: Int[Array, " T"]) -> Int[Array, ""]:
    """How many of a row's sequences have a token for which `of_token` is true."""
    return jnp.sum(jnp.zeros(len(ids) + 1, bool).at[ids].max(of_token))


def _mismatch(difference: Float[Array, "R T"], measured: Bool[Array, "R T"]) -> DeviceMetrics:
    """How far the sampler's log-probabilities are from the trainer's; `difference` is trainer - sampler, or 0.

    `mismatch_kl` estimates KL(sampler || trainer).
    """
    return {
        "mismatch": jnp.sum(jnp.abs(difference)),
        "mismatch_kl": jnp.sum(kl_estimate(difference)),
        "mismatch_tokens": jnp.sum(measured),
        "mismatch_max": jnp.max(jnp.abs(difference)),
    }


def summarize(sums: Sequence[dict[str, Any]], applied: Sequence[dict[str, Any]]) -> Metrics:
    """A step's metrics: the microbatches' sums as means over trained tokens, and the norms as means over updates.

    Args:
      sums: the metrics of each microbatch, from `Objective`.
      applied: the metrics of each optimizer update.
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
        mismatch["mismatch/truncated"] = total.pop("truncated") / generated  # share of tokens
    if "masked" in total:
        mismatch["mismatch/masked"] = total.pop("masked")  # responses
    padding, loss = total.pop("padding") / total.pop("places"), total.pop("loss")
    return (
        {f"policy/{name}": value / tokens for name, value in total.items()}
        | {f"policy/{name}": float(sum(float(m[name]) for m in applied)) / len(applied) for name in applied[0]}
        | {"policy/loss": loss / len(applied), "packing/padding": padding}  # share of the update's tokens
        | mismatch
    )


def check_finite(metrics: Metrics, where: str) -> None:
    """Called before anything of an update is logged or saved. The metrics include the norm of the new weights.

    Raises:
      DivergenceError: naming the metrics that are not finite, and `where` that happened.
    """
    wrong = [f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value)]
    if wrong:
        raise DivergenceError(f"{where} gave {', '.join(wrong)}")
