"""The policy update for all methods: accumulates gradients of microbatches, clips them, and applies AdamW."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from poly_epo_jax.config.keys import Config, OptimizerSection, updates_per_step
from poly_epo_jax.model.logprobs import token_logprobs
from poly_epo_jax.model.lora import trained_pattern
from poly_epo_jax.model.partition import merge_params, split_params
from poly_epo_jax.model.transformer import Transformer
from poly_epo_jax.parallel.compiler_options import compiler_options
from poly_epo_jax.parallel.sharding import abstract_arrays, param_shardings, replicated, row_sharding
from poly_epo_jax.set_rl import policy_gradient_loss
from poly_epo_jax.step.advantages import make_loss
from poly_epo_jax.step.objective import DeviceMetrics, UpdateObjective, summarize
from poly_epo_jax.step.optimizer import make_optimizer, make_schedule
from poly_epo_jax.step.packing import PackedBatch, ZeroAdvantageBatch, empty_batch
from poly_epo_jax.types import Metrics, Params

LIKELIHOOD, DEFAULTS = UpdateObjective(policy_gradient_loss), OptimizerSection()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Weights and optimizer state, as stored in a checkpoint.

    Attributes:
      trainable: Trainable weights, a Params tree.
      frozen: Frozen weights, a Params tree. Orbax restores an empty tree as a leaf.
      opt_state: Optimizer state, with the moments of the trainable weights.
      updates: Number of completed optimizer updates, an int32 scalar.
    """

    trainable: Any  # the leaves of all fields may also be shapes or shardings
    frozen: Any
    opt_state: Any
    updates: Any

    @property
    def params(self) -> Params:
        """Trainable and frozen weights."""
        return merge_params(self.trainable, self.frozen)


class PolicyUpdate:
    """Applies one optimizer update per minibatch to a policy.

    Args:
      model: The policy, possibly abstract, because only its structure is used.
      mesh: Mesh over which weights and batches are sharded.
      objective: Objective to minimize.
      config: The `optimizer` section of the configuration.
      total_updates: Number of updates after which the learning-rate schedule ends.
      trainable: Regular expression that selects the weights to train, see `split_params`. Empty selects all weights.
    """

    def __init__(
        self,
        model: Transformer,
        mesh: Mesh,
        objective: UpdateObjective = LIKELIHOOD,
        config: OptimizerSection = DEFAULTS,
        total_updates: int = 1,
        trainable: str = "",
    ):
        self.mesh, self.objective = mesh, objective
        self.schedule = make_schedule(config, total_updates)
        self.optimizer = make_optimizer(config)
        self._split = partial(split_params, pattern=trainable)
        self._model_def, state = nnx.split(model)
        self.abstract_state = jax.eval_shape(self._first_state, *self._split(nnx.to_pure_dict(state)))
        self.shardings = self._state_shardings(param_shardings(model, mesh))

        weights, scalar = self.shardings.trainable, replicated(mesh)
        jit = partial(jax.jit, compiler_options=compiler_options(mesh))
        self._init = jax.jit(self._first_state, out_shardings=self.shardings)
        self._zeros = jax.jit(partial(jax.tree.map, _float32_zeros), out_shardings=weights)
        self._logprobs = jit(lambda params, batch: self._forward(params, batch)[0][0], out_shardings=row_sharding(mesh))
        self._accumulate = jit(self._add_gradient, donate_argnums=2, out_shardings=(weights, scalar))
        self._measure = jit(lambda params, batch: self._loss(params, batch)[1], out_shardings=scalar)
        self._apply = jit(self._apply_gradient, donate_argnums=0, out_shardings=(self.shardings, scalar))
        self._skip = jax.jit(
            lambda state: dataclasses.replace(state, updates=state.updates + 1),
            donate_argnums=0,
            out_shardings=self.shardings,
        )

    def _state_shardings(self, weights: Params) -> TrainState:
        """Returns the shardings of the state. Moments are sharded like their weights, and scalars are replicated."""
        trainable, frozen = self._split(weights)
        scalar = replicated(self.mesh)
        opt_state = optax.tree_map_params(
            self.optimizer,
            lambda _, sharding: sharding,
            self.abstract_state.opt_state,
            trainable,
            transform_non_params=lambda _: scalar,
        )
        return TrainState(trainable, frozen, opt_state, scalar)

    def _forward(self, params: Params, batch: PackedBatch) -> tuple[tuple[jax.Array, jax.Array], DeviceMetrics]:
        """Computes the log-probabilities of the targets and the entropies, [R, T], on response tokens.

        Returns:
          Both arrays, and statistics of the routers.
        """
        policy = nnx.merge(self._model_def, params)
        hidden, statistics = policy.hidden_states(
            jnp.asarray(batch.tokens), jnp.asarray(batch.positions), jnp.asarray(batch.segment_ids)
        )
        targets, is_response = jnp.asarray(batch.targets), jnp.asarray(batch.weights) > 0
        return token_logprobs(hidden, policy.head, targets, is_response, self.objective.temperature), statistics

    def _loss(self, params: Params, batch: PackedBatch) -> tuple[jax.Array, DeviceMetrics]:
        values, statistics = self._forward(params, batch)
        total, metrics = self.objective(*values, batch)
        # Weighted by tokens, because `summarize` divides the sums over microbatches by the number of tokens.
        return total, metrics | {name: value * metrics["tokens"] for name, value in statistics.items()}

    def _add_gradient(
        self, trainable: Params, frozen: Params, gradients: Params, batch: PackedBatch
    ) -> tuple[Params, DeviceMetrics]:
        def loss(trainable: Params) -> tuple[jax.Array, DeviceMetrics]:
            return self._loss(merge_params(trainable, frozen), batch)

        # The backward pass adds each layer's gradient in place, so that a second gradient tree is never allocated.
        total, pullback, metrics = jax.vjp(loss, trainable, has_aux=True)
        sums = jax.tree.map(jax.new_ref, gradients)
        pullback.with_refs(sums)(jnp.ones_like(total))  # pyright: ignore[reportFunctionMemberAccess]
        return jax.tree.map(jax.freeze, sums), metrics

    def _apply_gradient(self, state: TrainState, gradients: Params) -> tuple[TrainState, DeviceMetrics]:
        directions, opt_state = self.optimizer.update(gradients, state.opt_state, state.trainable)
        learning_rate = jnp.asarray(self.schedule(state.updates))
        metrics = {
            "gradient_norm": optax.global_norm(gradients),
            "update_norm": learning_rate * optax.global_norm(directions),
            "learning_rate": learning_rate,
        }
        updates = jax.tree.map(lambda direction: -learning_rate * direction, directions)
        trainable = optax.apply_updates(state.trainable, updates)
        metrics["weight_norm"] = optax.global_norm(jax.tree.map(lambda weight: weight.astype(jnp.float32), trainable))
        return TrainState(trainable, state.frozen, opt_state, state.updates + 1), metrics

    def lower(self, num_rows: int, row_tokens: int) -> dict[str, jax.stages.Lowered]:
        """Lowers the programs of the update without weights. The devices of the mesh need not be available locally.

        Args:
          num_rows: Number of rows of a microbatch.
          row_tokens: Length of a row, in tokens.

        Returns:
          The programs for old log-probabilities (`logprobs`), for adding the gradient of a microbatch (`gradient`) and
          for applying the accumulated gradient (`optimizer`).
        """
        state = abstract_arrays(self.abstract_state, self.shardings)
        gradients = abstract_arrays(jax.eval_shape(self._zeros, state.trainable), self.shardings.trainable)
        padding = empty_batch(num_rows, row_tokens)
        batch = abstract_arrays(padding, jax.tree.map(self._batch_sharding, padding))
        with jax.set_mesh(self.mesh):
            return {
                "logprobs": self._logprobs.lower(state.params, batch),
                "gradient": self._accumulate.lower(state.trainable, state.frozen, gradients, batch),
                "optimizer": self._apply.lower(state, gradients),
            }

    def init(self, params: Params) -> TrainState:
        """Creates the initial training state. Takes ownership of `params`: updates may donate their buffers."""
        with jax.set_mesh(self.mesh):
            return self._init(*self._split(params))

    def _first_state(self, trainable: Params, frozen: Params) -> TrainState:
        # Gradients are accumulated in float32 regardless of the weights' dtype, so moments are created for float32.
        return TrainState(
            trainable,
            frozen,
            self.optimizer.init(jax.tree.map(_float32_zeros, trainable)),
            jnp.zeros((), jnp.int32),
        )

    def with_old_logprobs(
        self, state: TrainState, minibatches: Sequence[Sequence[PackedBatch]], reference: Params | None = None
    ) -> list[list[PackedBatch]]:
        """Adds old and reference log-probabilities to the minibatches of a step, before its first update.

        The first minibatch is marked as `on_policy` instead: it is trained with the weights of the old policy, so its
        probability ratios are exactly 1.

        Args:
          state: State before the first update of the step.
          minibatches: Microbatches of each minibatch.
          reference: Weights of the reference policy if the objective has a KL term; frozen weights may be left out.

        Returns:
          The microbatches of each minibatch, on the devices of the mesh.
        """
        params, objective = state.params, self.objective
        with jax.set_mesh(self.mesh):
            filled = []
            for index, minibatch in enumerate(minibatches):
                batches = [self.place(batch._replace(on_policy=np.array(not index))) for batch in minibatch]
                if index:
                    batches = [b._replace(old_logprobs=self._logprobs(params, PackedBatch(*b))) for b in batches]
                if objective.kl_coef:
                    merged = merge_params(state.frozen, reference or {})
                    batches = [b._replace(reference_logprobs=self._logprobs(merged, PackedBatch(*b))) for b in batches]
                filled.append(batches)
            return filled

    def gradient(self, state: TrainState, minibatch: Sequence[PackedBatch]) -> tuple[Params, list[DeviceMetrics]]:
        """Computes the gradient of a minibatch, summed over its microbatches.

        Args:
          state: State before the update.
          minibatch: Microbatches. The backward pass of a `ZeroAdvantageBatch` is skipped.

        Returns:
          The gradient of the trainable weights in float32, and the metrics of each microbatch as sums over tokens.
        """
        gradients, metrics = self.zero_gradients(state), []
        with jax.set_mesh(self.mesh):
            for batch in minibatch:
                placed = self.place(PackedBatch(*batch))
                if isinstance(batch, ZeroAdvantageBatch):
                    sums = self._measure(state.params, placed)
                else:
                    gradients, sums = self._accumulate(state.trainable, state.frozen, gradients, placed)
                metrics.append(sums)
            return gradients, metrics

    def zero_gradients(self, state: TrainState) -> Params:
        """Returns the initial value of accumulated gradients: float32 zeros, sharded like the trainable weights."""
        with jax.set_mesh(self.mesh):
            return self._zeros(state.trainable)

    def __call__(self, state: TrainState, minibatches: Sequence[Sequence[PackedBatch]]) -> tuple[TrainState, Metrics]:
        """Applies one optimizer update per minibatch, in order.

        Args:
          state: State before the updates. Its buffers are donated.
          minibatches: Microbatches of each minibatch, from `with_old_logprobs`. An empty minibatch only advances the
            learning-rate schedule.

        Returns:
          The state after the updates, and the metrics of the step.
        """
        sums: list[DeviceMetrics] = []
        applied: list[DeviceMetrics] = []
        for minibatch in minibatches:
            if not minibatch:
                with jax.set_mesh(self.mesh):
                    state = self._skip(state)
                continue
            gradients, metrics = self.gradient(state, minibatch)
            with jax.set_mesh(self.mesh):
                state, norms = self._apply(state, gradients)
            sums += metrics
            applied.append(norms)
        return state, summarize(*jax.device_get((sums, applied))) | {
            "judge/skipped_updates": float(len(minibatches) - len(applied))
        }

    def place(self, batch: PackedBatch) -> PackedBatch:
        """Transfers a microbatch to the devices of the mesh, with its rows sharded."""

        def put(x: Any) -> jax.Array:
            # Every process holds the full batch and places only the shards of its local devices.
            sharding = self._batch_sharding(x)
            return x if isinstance(x, jax.Array) else jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

        return jax.tree.map(put, batch)

    def _batch_sharding(self, x: Any) -> jax.sharding.NamedSharding:
        return row_sharding(self.mesh) if x.ndim else replicated(self.mesh)


def make_update(config: Config, model: Transformer, mesh: Mesh) -> PolicyUpdate:
    """Creates the update of a run. The bench and the ahead-of-time compiler measure the same update.

    Args:
      config: Configuration of the run. The learning-rate schedule ends with the last update of its last step.
      model: The policy, possibly abstract, because only its structure is used.
      mesh: Mesh over which weights and batches are sharded.
    """
    algo = config.algo
    objective = UpdateObjective(
        make_loss(algo),
        config.sampling.temperature,
        algo.kl_coef,
        algo.entropy_coef,
        algo.importance_cap,
        algo.max_mismatch_ratio,
    )
    return PolicyUpdate(
        model,
        mesh,
        objective,
        config.optimizer,
        config.train.num_steps * updates_per_step(config.train),
        trained_pattern(config),
    )


def _float32_zeros(x: Any) -> jax.Array:
    return jnp.zeros(x.shape, jnp.float32)
