"""What a configuration may name: the registries behind its words, and the task that it means."""

from ml_collections import ConfigDict

from poly_epo_jax.algorithm import ADVANTAGES
from poly_epo_jax.config import ConfigError
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.model.attention import IMPLEMENTATIONS
from poly_epo_jax.model.qwen3 import REMAT_POLICIES
from poly_epo_jax.parallel.devices import DEVICES
from poly_epo_jax.rollouts import ROLLOUTS, WEIGHT_SYNCS
from poly_epo_jax.set_rl import LOSSES, OBJECTIVES
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.types import Task
from poly_epo_jax.update import SCHEDULES

CHOICES = {
    "task.name": TASKS,
    "judge.name": JUDGES,
    "rollouts.name": ROLLOUTS,
    "rollouts.weight_sync": WEIGHT_SYNCS,
    "rollouts.weights_dtype": ("float32", "bfloat16"),
    "algo.old_logprobs": ("trainer", "sampler"),
    "train.staleness": (0, 1),
    "algo.advantages": ADVANTAGES,
    "algo.objective": OBJECTIVES,
    "algo.loss": LOSSES,
    "algo.length_normalization": ("own", "max"),
    "model.dtype": ("float32", "bfloat16"),
    "model.param_dtype": ("float32", "bfloat16"),
    "model.remat": REMAT_POLICIES,
    "model.attention": ("auto", *IMPLEMENTATIONS),
    "mesh.device": ("", *DEVICES),
    "optimizer.schedule": SCHEDULES,
    "optimizer.first_moment_dtype": ("float32", "bfloat16"),
}


def make_task(config: ConfigDict) -> Task:
    """The task that `config.task` names, with its options.

    Raises:
      ConfigError: it has no such options.
    """
    options = config.task.options.to_dict()
    try:
        return TASKS[config.task.name](**options)
    except TypeError as error:
        raise ConfigError(f"task.options={options} does not fit task {config.task.name}: {error}.") from None
