"""The policy update: gradients of packed microbatches, accumulated, clipped, and given to AdamW.

It knows per-token advantages and a loss function, and no method's name.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from poly_epo_jax.batching import PackedBatch, empty_batch
from poly_epo_jax.config import OptimizerSection
from poly_epo_jax.model.logprobs import token_logprobs
from poly_epo_jax.model.qwen3 import Qwen3
from poly_epo_jax.model.sharding import param_shardings, replicated, row_sharding
from poly_epo_jax.set_rl.losses import Loss
from poly_epo_jax.types import Metrics, Params

DeviceMetrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that training changes: weights, optimizer moments, and the number of optimizer updates made (int32)."""

    params: Params
    opt_state: Any
    updates: Any


SCHEDULES: dict[str, Callable[[float, float, int], optax.Schedule]] = {
    "constant": lambda peak, end, updates: optax.constant_schedule(peak),
    "linear": optax.linear_schedule,
    "cosine": lambda peak, end, updates: optax.cosine_decay_schedule(peak, updates, end / peak),
}


def make_schedule(config: OptimizerSection, total_updates: int) -> optax.Schedule:
    """Learning rate by update: linear warm-up, then one of SCHEDULES down to `final_fraction` of the peak."""
    peak, warmup = config.learning_rate, config.warmup_updates
    decay = SCHEDULES[config.schedule](peak, peak * config.final_fraction, max(total_updates - warmup, 1))
    if not warmup:
        return decay
    # Counted from one, so that the first update already moves.
    return optax.join_schedules([lambda update: peak * (update + 1) / (warmup + 1), decay], [warmup])


class PolicyUpdate:
    """Turns minibatches into optimizer updates of a policy.

    Args:
      model: the policy, possibly abstract: only its structure is used.
      loss: one of set_rl.LOSSES with its clip range bound.
      config: the `optimizer` section of the configuration.
      total_updates: after which the learning-rate schedule ends.
      temperature: of the sampling distribution whose log-probabilities are trained.
      kl_coef, entropy_coef: weights of KL(policy || reference) and of the entropy bonus.
      importance_cap: where given, probability ratios are to the sampler's log-probabilities and truncated at this value
        (truncated importance sampling); else they are to the policy's own before the step's first update.
    """

    def __init__(
        self,
        model: Qwen3,
        mesh: Mesh,
        loss: Loss,
        config: OptimizerSection,
        total_updates: int,
        temperature: float = 1.0,
        kl_coef: float = 0.0,
        entropy_coef: float = 0.0,
        importance_cap: float | None = None,
    ):
        self.mesh = mesh
        self.kl_coef = kl_coef
        self.importance_cap = importance_cap
        self.schedule = make_schedule(config, total_updates)
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(config.max_grad_norm),
            optax.adamw(
                self.schedule,
                config.b1,
                config.b2,
                config.eps,
                weight_decay=config.weight_decay,
                mu_dtype=config.first_moment_dtype,
            ),
        )

        model_def, state = nnx.split(model)
        weights, scalar = param_shardings(model, mesh), replicated(mesh)
        opt_state = optax.tree_map_params(
            self.optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(self._first_state, nnx.to_pure_dict(state)).opt_state,
            weights,
            transform_non_params=lambda _: scalar,
        )
        self.shardings = TrainState(weights, opt_state, scalar)

        self.abstract_state = jax.eval_shape(self._first_state, nnx.to_pure_dict(state))

        def forward(params: Params, batch: PackedBatch) -> tuple[jax.Array, jax.Array]:
            policy = nnx.merge(model_def, params)
            tokens, positions, segment_ids, targets = map(
                jnp.asarray, (batch.tokens, batch.positions, batch.segment_ids, batch.targets)
            )
            hidden = policy(tokens, positions, segment_ids)
            return token_logprobs(hidden, policy.head, targets, jnp.asarray(batch.weights) > 0, temperature)

        def objective(params: Params, batch: PackedBatch) -> tuple[jax.Array, DeviceMetrics]:
            logprobs, entropy = forward(params, batch)
            present = jax.lax.stop_gradient(logprobs)
            is_response = batch.weights > 0
            first_logprobs = jnp.where(batch.on_policy, present, batch.old_logprobs)
            measured = is_response if importance_cap is None else is_response & batch.on_policy
            sums = _mismatch(first_logprobs, batch.sampler_logprobs, measured)
            if importance_cap is None:
                old_logprobs = first_logprobs
            else:
                # A ratio of at most the cap; where that binds, the token keeps its gradient, weighted by the cap.
                floor = present - jnp.log(importance_cap)
                old_logprobs = jnp.maximum(batch.sampler_logprobs, floor)
                sums["truncated"] = jnp.sum(is_response & (batch.sampler_logprobs < floor))
            total, metrics = loss(logprobs, old_logprobs, batch.advantages, batch.weights)
            if kl_coef:
                # The k3 estimate of KL(policy || reference): unbiased and never negative.
                log_ratio = jnp.where(is_response, batch.reference_logprobs - logprobs, 0.0)
                kl = jnp.exp(log_ratio) - 1 - log_ratio
                total += kl_coef * jnp.sum(batch.weights * kl)
                metrics["reference_kl"] = jnp.sum(kl)
            if entropy_coef:
                total -= entropy_coef * jnp.sum(batch.weights * entropy)
            sums["padding"] = jnp.mean(batch.segment_ids == 0)
            metrics |= {"entropy": jnp.sum(jnp.where(is_response, entropy, 0.0)), "tokens": jnp.sum(is_response)}
            return total, metrics | sums | {"loss": total}

        def accumulate(params: Params, gradients: Params, batch: PackedBatch) -> tuple[Params, DeviceMetrics]:
            # Each layer's gradient is added in place as the backward pass makes it: there is no second tree of them.
            total, pullback, metrics = jax.vjp(lambda params: objective(params, batch), params, has_aux=True)
            sums = jax.tree.map(jax.new_ref, gradients)
            pullback.with_refs(sums)(jnp.ones_like(total))  # pyright: ignore[reportFunctionMemberAccess]
            return jax.tree.map(jax.freeze, sums), metrics

        def apply(state: TrainState, gradients: Params) -> tuple[TrainState, DeviceMetrics]:
            updates, opt_state = self.optimizer.update(gradients, state.opt_state, state.params)
            metrics = {
                "gradient_norm": optax.global_norm(gradients),
                "update_norm": optax.global_norm(updates),
                "learning_rate": jnp.asarray(self.schedule(state.updates)),
            }
            params = optax.apply_updates(state.params, updates)
            return TrainState(params, opt_state, state.updates + 1), metrics

        self._init = jax.jit(self._first_state, out_shardings=self.shardings)
        self._zeros = jax.jit(partial(jax.tree.map, _float32_zeros), out_shardings=weights)
        self._logprobs = jax.jit(lambda params, batch: forward(params, batch)[0], out_shardings=row_sharding(mesh))
        self._accumulate = jax.jit(accumulate, donate_argnums=1, out_shardings=(weights, scalar))
        self._apply = jax.jit(apply, donate_argnums=0, out_shardings=(self.shardings, scalar))

    def lower(self, num_rows: int, row_tokens: int) -> dict[str, jax.stages.Lowered]:
        """The programs of microbatches [num_rows, row_tokens] and of the optimizer, to be compiled without weights.

        `logprobs` makes old log-probabilities, `gradient` adds a microbatch's to the sum, `optimizer` takes the sum.
        """

        def abstract(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        state = jax.tree.map(abstract, self.abstract_state, self.shardings)
        gradients = jax.tree.map(abstract, jax.eval_shape(self._zeros, state.params), self.shardings.params)
        batch = self.place(empty_batch(num_rows, row_tokens))
        with jax.set_mesh(self.mesh):
            return {
                "logprobs": self._logprobs.lower(state.params, batch),
                "gradient": self._accumulate.lower(state.params, gradients, batch),
                "optimizer": self._apply.lower(state, gradients),
            }

    def init(self, params: Params) -> TrainState:
        """The state before the first update; it owns `params` from here on."""
        with jax.set_mesh(self.mesh):
            return self._init(params)

    def _first_state(self, params: Params) -> TrainState:
        # Moments are those of float32 gradients, whatever the weights' type.
        opt_state = self.optimizer.init(jax.tree.map(_float32_zeros, params))
        return TrainState(params, opt_state, jnp.zeros((), jnp.int32))

    def with_old_logprobs(
        self, params: Params, minibatches: Sequence[Sequence[PackedBatch]], reference: Params | None = None
    ) -> list[list[PackedBatch]]:
        """The minibatches with the log-probabilities that later updates compare with, made before the first of them.

        The first minibatch needs none: `params` do not change before it, so its ratios are exactly one. Nor do the
        others where ratios are to the sampler's.
        """
        with jax.set_mesh(self.mesh):
            filled = []
            for index, minibatch in enumerate(minibatches):
                batches = [self.place(batch._replace(on_policy=np.array(not index))) for batch in minibatch]
                if index and self.importance_cap is None:
                    batches = [batch._replace(old_logprobs=self._logprobs(params, batch)) for batch in batches]
                if self.kl_coef:
                    batches = [batch._replace(reference_logprobs=self._logprobs(reference, batch)) for batch in batches]
                filled.append(batches)
            return filled

    def gradient(self, params: Params, minibatch: Sequence[PackedBatch]) -> tuple[Params, list[DeviceMetrics]]:
        """The loss's gradient over a minibatch, summed over its microbatches, and each one's sums of metrics."""
        gradients, metrics = self.zero_gradients(params), []
        with jax.set_mesh(self.mesh):
            for batch in minibatch:
                gradients, sums = self._accumulate(params, gradients, self.place(batch))
                metrics.append(sums)
            return gradients, metrics

    def zero_gradients(self, params: Params) -> Params:
        """What gradients are added to: float32, laid out as the weights are."""
        with jax.set_mesh(self.mesh):
            return self._zeros(params)

    def __call__(self, state: TrainState, minibatches: Sequence[Sequence[PackedBatch]]) -> tuple[TrainState, Metrics]:
        """One optimizer update per minibatch, in order. `state` is consumed."""
        sums: list[DeviceMetrics] = []
        applied: list[DeviceMetrics] = []
        for minibatch in minibatches:
            gradients, metrics = self.gradient(state.params, minibatch)
            with jax.set_mesh(self.mesh):
                state, norms = self._apply(state, gradients)
            sums += metrics
            applied.append(norms)
        return state, _summarize(*jax.device_get((sums, applied)))

    def place(self, batch: PackedBatch) -> PackedBatch:
        """The microbatch on the mesh."""
        rows, scalar = row_sharding(self.mesh), replicated(self.mesh)

        def put(x: Any) -> jax.Array:
            sharding = rows if x.ndim else scalar
            # Every host has the whole batch, and takes its devices' part.
            return x if isinstance(x, jax.Array) else jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

        return jax.tree.map(put, batch)


def _float32_zeros(x: Any) -> jax.Array:
    return jnp.zeros(x.shape, jnp.float32)


def _mismatch(trained: Any, sampled: Any, measured: Any) -> DeviceMetrics:
    """How far the sampler's log-probabilities are from the trainer's, for one and the same policy.

    `mismatch_kl` sums the k3 estimate of KL(sampler || trainer), e^d - 1 - d with d = trained - sampled.
    """
    difference = jnp.where(measured, trained - sampled, 0.0)
    return {
        "mismatch": jnp.sum(jnp.abs(difference)),
        "mismatch_kl": jnp.sum(jnp.expm1(difference) - difference),
        "mismatch_tokens": jnp.sum(measured),
        "mismatch_max": jnp.max(jnp.abs(difference)),
    }


def _summarize(sums: list[dict[str, Any]], applied: list[dict[str, Any]]) -> Metrics:
    """Means over tokens of what the loss counted, means over updates of the norms."""
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
