"""AdamW with clipped gradients and a learning-rate schedule, as set by the `optimizer` section of a configuration."""

from collections.abc import Callable

import jax
import optax

from poly_epo_jax.config import OptimizerSection

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


def make_optimizer(config: OptimizerSection, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Gradients longer than `max_grad_norm` are scaled down to it before Adam sees them; weight decay is decoupled."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            schedule,
            config.b1,
            config.b2,
            config.eps,
            weight_decay=config.weight_decay,
            mu_dtype=config.first_moment_dtype,
        ),
    )


def skip_update(opt_state: optax.OptState) -> optax.OptState:
    """The state after an update with nothing to train on: the schedule advances, the moments stay as they are."""

    def is_schedule(state: optax.OptState) -> bool:
        return isinstance(state, optax.ScaleByScheduleState)

    return jax.tree.map(
        lambda state: state._replace(count=state.count + 1) if is_schedule(state) else state,
        opt_state,
        is_leaf=is_schedule,
    )
