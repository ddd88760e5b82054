"""AdamW with clipped gradients and a learning-rate schedule, as set by the `optimizer` section of a configuration."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from poly_epo_jax.config.keys import OptimizerSection

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
    # Counted from one, so that the first update already changes the weights.
    return optax.join_schedules([lambda update: peak * (update + 1) / (warmup + 1), decay], [warmup])


def decays(config: OptimizerSection) -> bool:
    """Whether the learning rate depends on how many updates a run makes."""
    return config.schedule != "constant"


def make_optimizer(config: OptimizerSection) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) up to the learning rate: the caller subtracts this times the result.

    Weight decay is decoupled. Gradients longer than `max_grad_norm` are scaled down to it before Adam sees them.
    """
    return optax.chain(
        optax.stateless(lambda gradients, _: _clip(gradients, config.max_grad_norm)),
        optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=config.first_moment_dtype),
        optax.add_decayed_weights(config.weight_decay),
    )


def _clip(gradients: optax.Updates, max_norm: float) -> optax.Updates:
    """One factor for all: optax divides each gradient by the norm, which takes a CPU a pass of its own."""
    factor = jnp.minimum(1.0, max_norm / optax.global_norm(gradients))
    return jax.tree.map(lambda gradient: gradient * factor, gradients)
