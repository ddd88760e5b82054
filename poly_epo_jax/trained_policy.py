"""Opens what a run has trained: the policy of one of its checkpoints."""

from pathlib import Path

from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from poly_epo_jax.checkpoint import Checkpoints
from poly_epo_jax.model.sharding import param_shardings
from poly_epo_jax.policy import Policy, open_policy
from poly_epo_jax.types import Params


def open_trained_policy(
    run: Path, section: ConfigDict, mesh: Mesh, step: int | None = None
) -> tuple[Policy, Params, int]:
    """The policy of a run folder, its weights at `step` (None: the newest checkpoint) laid out on the mesh, that step.

    Args:
      section: the `model` section of a configuration: how to compute.

    Raises:
      FileNotFoundError: the run has no such checkpoint.
    """
    if not (run / "checkpoints").is_dir():
        raise FileNotFoundError(f"{run} has no checkpoints; give the run folder of a training run.")
    checkpoints = Checkpoints(run / "checkpoints")
    step = checkpoints.latest_step if step is None else step
    if step is None or step not in checkpoints.steps:
        raise FileNotFoundError(f"{run} has no checkpoint of step {step}; it has those of {checkpoints.steps}.")
    policy = open_policy(run / "policy", section)
    abstract = nnx.to_pure_dict(nnx.split(policy.model)[1])
    return policy, checkpoints.restore_params(step, abstract, param_shardings(policy.model, mesh)), step
