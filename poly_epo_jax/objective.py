"""What an update minimises, as pure functions of one microbatch: J's loss, the KL and entropy terms, and their metrics.

Metrics are sums over response tokens, so that those of microbatches add up; `summarize` makes means of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from poly_epo_jax.batching import PackedBatch
from poly_epo_jax.set_rl import Loss, Tokens, kl_estimate
from poly_epo_jax.types import Metrics

DeviceMetrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Objective:
    """The update's objective: `loss`, one of set_rl.LOSSES with its keywords bound, and what is added to it.

    Args:
      temperature: of the sampling distribution whose log-probabilities are trained.
      kl_coef, entropy_coef: weights of KL(policy || reference) and of the entropy bonus.
      importance_cap: where given, probability ratios are to the sampler's log-probabilities and truncated at this value
        (truncated importance sampling); else they are to the policy's own before the step's first update.
    """

    loss: Loss
    temperature: float = 1.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance_cap: float | None = None

    def __call__(
        self, logprobs: Float[Array, "R T"], entropy: Float[Array, "R T"], batch: PackedBatch
    ) -> tuple[Float[Array, ""], DeviceMetrics]:
        """The microbatch's loss and sums of metrics, from the present policy's log-probabilities and entropies."""
        is_response = jnp.asarray(batch.weights) > 0
        old_logprobs, sums = self._old_logprobs(jax.lax.stop_gradient(logprobs), is_response, batch)
        arrays = map(jnp.asarray, (batch.advantages, batch.weights, batch.segment_ids))
        total, metrics = self.loss(Tokens(logprobs, old_logprobs, *arrays))
        if self.kl_coef:
            kl = kl_estimate(jnp.where(is_response, batch.reference_logprobs - logprobs, 0.0))
            total += self.kl_coef * jnp.sum(batch.weights * kl)
            metrics["reference_kl"] = jnp.sum(kl)
        if self.entropy_coef:
            total -= self.entropy_coef * jnp.sum(batch.weights * entropy)
        sums["padding"] = jnp.mean(batch.segment_ids == 0)
        metrics |= {"entropy": jnp.sum(jnp.where(is_response, entropy, 0.0)), "tokens": jnp.sum(is_response)}
        return total, metrics | sums | {"loss": total}

    def _old_logprobs(
        self, present: Float[Array, "R T"], is_response: Bool[Array, "R T"], batch: PackedBatch
    ) -> tuple[Float[Array, "R T"], DeviceMetrics]:
        """The log-probabilities that ratios are to, and how far the sampler's are from the trainer's."""
        first = jnp.where(batch.on_policy, present, batch.old_logprobs)
        difference = first - batch.sampler_logprobs
        if self.importance_cap is None:
            return first, _mismatch(difference, is_response)
        # A ratio of at most the cap; where that binds, the token keeps its gradient, weighted by the cap.
        floor = present - jnp.log(self.importance_cap)
        truncated = {"truncated": jnp.sum(is_response & (batch.sampler_logprobs < floor))}
        # Later minibatches are trained with other weights than sampled them: they say nothing of the sampler.
        measured = is_response & batch.on_policy
        return jnp.maximum(batch.sampler_logprobs, floor), _mismatch(
            first - batch.sampler_logprobs, measured
        ) | truncated


def _mismatch(difference: Float[Array, "R T"], measured: Bool[Array, "R T"]) -> DeviceMetrics:
    """How far the sampler's log-probabilities are from the trainer's, for one and the same policy.

    `mismatch_kl` estimates KL(sampler || trainer); `difference` is trained - sampled.
    """
    difference = jnp.where(measured, difference, 0.0)
    return {
        "mismatch": jnp.sum(jnp.abs(difference)),
        "mismatch_kl": jnp.sum(kl_estimate(difference)),
        "mismatch_tokens": jnp.sum(measured),
        "mismatch_max": jnp.max(jnp.abs(difference)),
    }


def summarize(sums: Sequence[dict[str, Any]], applied: Sequence[dict[str, Any]]) -> Metrics:
    """A step's metrics: means over tokens of what the microbatches counted, means over updates of the norms.

    Args:
      sums: of each microbatch, from `Objective`.
      applied: of each optimizer update.
    """
    if not applied:
        return {}
    total = {name: float(sum(float(metrics[name]) for metrics in sums)) for name in sums[0]}
    tokens, mismatch_tokens = total.pop("tokens"), max(total.pop("mismatch_tokens"), 1.0)
    mismatch, mismatch_kl, loss = total.pop("mismatch"), total.pop("mismatch_kl"), total.pop("loss")
    total.pop("mismatch_max")
    padding = total.pop("padding") / len(sums)
    return (
        {f"policy/{name}": value / tokens for name, value in total.items()}
        | {f"policy/{name}": float(sum(float(m[name]) for m in applied)) / len(applied) for name in applied[0]}
        | {
            "policy/loss": loss / len(applied),
            "packing/padding": padding,  # share of the update's tokens
            "mismatch/mean": mismatch / mismatch_tokens,
            "mismatch/max": max(float(metrics["mismatch_max"]) for metrics in sums),
            "mismatch/kl": mismatch_kl / mismatch_tokens,
        }
    )
