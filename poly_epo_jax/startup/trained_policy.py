"""The policy of a training run: opens it from the run folder, at any of its checkpoints."""

import dataclasses
from pathlib import Path

from jax.sharding import Mesh

from poly_epo_jax.config.keys import LoraSection, ModelSection
from poly_epo_jax.model.checkpoint import Checkpoints
from poly_epo_jax.model.lora import ADAPTER
from poly_epo_jax.model.policy import Policy, open_policy
from poly_epo_jax.model.qwen3 import param_shapes
from poly_epo_jax.parallel.sharding import param_shardings
from poly_epo_jax.records.run_folder import CHECKPOINTS, POLICY, read_about, read_config
from poly_epo_jax.types import Params


def open_trained_policy(
    run: Path, section: ModelSection, mesh: Mesh, step: int | None = None, base: Path | None = None
) -> tuple[Policy, Params, int]:
    """The policy of a run folder, its weights at `step` (None: the newest) laid out on the mesh, and that step.

    Args:
      section: the `model` section of a configuration: how to compute.
      base: the base policy's folder, if the run trained an adapter and that folder has moved since.

    Raises:
      FileNotFoundError: the run has no such checkpoint.
      CheckpointError: the checkpoint is damaged; or, if the newest is asked for, all are.
    """
    if not (run / CHECKPOINTS).is_dir():
        raise FileNotFoundError(f"{run} has no checkpoints; give the run folder of a training run.")
    saved, checkpoints = read_config(run), Checkpoints(run / CHECKPOINTS, read_only=True)
    # Checkpoints are verified bit for bit, so they are read in the type that they were saved in.
    section = dataclasses.replace(section, param_dtype=saved["model"]["param_dtype"])
    lora = LoraSection(**saved["lora"] | {"targets": tuple(saved["lora"]["targets"])})
    policy = open_policy(run / POLICY, section, lora=lora)
    abstract, shardings = param_shapes(policy.model), param_shardings(policy.model, mesh)
    trainable = ADAPTER if lora.rank else saved["train"]["trainable"]
    frozen = dataclasses.replace(policy, path=base_folder(run, base)).load_base(mesh) if lora.rank else None

    def restore(step: int) -> Params:
        return checkpoints.restore_params(step, abstract, shardings, trainable, frozen)

    if step in checkpoints.steps:
        return policy, restore(step), step
    newest = checkpoints.newest(restore) if step is None else None
    if newest is None:
        raise FileNotFoundError(f"{run} has no checkpoint of step {step}; it has those of {checkpoints.steps}.")
    return policy, newest[1], newest[0]


def base_folder(run: Path, moved: Path | None = None) -> Path:
    """The folder of the policy that a run trained an adapter for: where the run had it, or where it was `moved`.

    Raises:
      FileNotFoundError: the folder is not there.
    """
    folder = moved or Path(read_about(run)["base"])
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{run} holds an adapter of the policy in {folder}, which is not there; bring that back, or export the run "
            "with --base, which names its folder."
        )
    return folder


def base_name(run: Path, moved: Path | None = None) -> str:
    """What others load that policy by: its name on the hub if the run has it from there, otherwise its folder."""
    named = str(read_config(run)["model"]["path"])
    return str(moved or (named if named and not Path(named).is_dir() else base_folder(run)))
