"""AdamW with gradient clipping and a learning-rate schedule, configured by the `optimizer` section."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from poly_epo_jax.config.keys import OptimizerSection

SCHEDULES: dict[str, Callable[[float, float, int], optax.Schedule]] = {
    "constant": lambda peak, end, updates: optax.constant_schedule(peak),
    "linear": optax.linear_schedule,
    "cosine": lambda peak, end, updates: optax.cosine_decay_schedule(peak, updates, end / peak if peak else 0),
}


def make_schedule(config: OptimizerSection, total_updates: int) -> optax.Schedule:
    """Creates the learning-rate schedule: linear warm-up, then one of SCHEDULES.

    Args:
      config: The `optimizer` section. The linear and cosine schedules end at `end_lr_fraction` of the peak, which is
        `learning_rate`.
      total_updates: Number of updates of the run, including the warm-up.

    Returns:
      A function that maps the number of previous updates to the learning rate.
    """
    peak, warmup = config.learning_rate, config.warmup_updates
    decay = SCHEDULES[config.schedule](peak, peak * config.end_lr_fraction, max(total_updates - warmup, 1))
    if not warmup:
        return decay
    # The warm-up counts updates from 1, so that the first update changes the weights.
    return optax.join_schedules([lambda update: peak * (update + 1) / (warmup + 1), decay], [warmup])


def decays(config: OptimizerSection) -> bool:
    """Returns True if the learning rate depends on the total number of updates of the run."""
    return config.schedule != "constant"


def make_optimizer(config: OptimizerSection) -> optax.GradientTransformation:
    """Creates AdamW (Loshchilov & Hutter 2019) without the final scaling by the learning rate.

    The caller subtracts the learning rate times the result from the weights. Gradients are scaled down to a global norm
    of at most `max_grad_norm` before they reach Adam. Weight decay is decoupled.
    """
    return optax.chain(
        optax.stateless(lambda gradients, _: _clip(gradients, config.max_grad_norm)),
        optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=config.first_moment_dtype),
        optax.add_decayed_weights(config.weight_decay),
    )


def _clip(gradients: optax.Updates, max_norm: float) -> optax.Updates:
    """Clips by the global norm with a single factor. On CPU, optax's division by the norm takes a separate pass."""
    factor = jnp.minimum(1.0, max_norm / optax.global_norm(gradients))
    return jax.tree.map(lambda gradient: gradient * factor, gradients)
