"""Loads the policy of a training run from its run folder, at any of its checkpoints."""

import dataclasses
from pathlib import Path
from typing import Literal

from jax.sharding import Mesh

from poly_epo_jax.config.keys import ConfigError, LoraSection, ModelSection
from poly_epo_jax.model.checkpoint import Checkpoints, best_step
from poly_epo_jax.model.lora import ADAPTER
from poly_epo_jax.model.policy import Policy, model_digest, open_policy
from poly_epo_jax.model.transformer import param_shapes
from poly_epo_jax.parallel.sharding import param_shardings
from poly_epo_jax.records.run_folder import (
    CHECKPOINTS,
    POLICY,
    checkpoint_digest,
    held_out_values,
    read_about,
    read_config,
)
from poly_epo_jax.startup.resume_checks import check_version
from poly_epo_jax.system.output_folder import check_contents
from poly_epo_jax.types import Params


def open_trained_policy(
    run: Path, section: ModelSection, mesh: Mesh, step: int | Literal["best"] | None = None, base: Path | None = None
) -> tuple[Policy, Params, int]:
    """Loads the policy of a run from a checkpoint.

    Args:
      run: Run folder.
      section: The `model` section of a configuration, which sets dtype, rematerialization and attention kernel. The
        dtype of the weights is that of the run.
      mesh: Mesh over which the weights are sharded.
      step: Step of the checkpoint, or "best" for the best step by `checkpoint.best`. If None, the newest valid
        checkpoint is used.
      base: Folder of the base policy. Only required if the run trained an adapter and the folder has moved.

    Returns:
      The policy, its sharded weights and the step of the checkpoint.

    Raises:
      FileNotFoundError: If the run does not have the checkpoint, or the base policy is missing.
      ValueError: If the run folder contains links.
      ConfigError: If another version of the package, with other configuration keys, trained the run, or if `step` is
        "best" and the run has no best step.
      CheckpointError: If the checkpoint is corrupted or, with `step=None`, if all checkpoints are corrupted.
    """
    if not (run / CHECKPOINTS).is_dir():
        raise FileNotFoundError(f"{run} has no checkpoints; set the path to the run folder of a training run.")
    check_contents(run)
    saved = read_config(run)
    check_version(run, saved)
    # Checkpoints are verified bit for bit, so they are read in the dtype in which they were saved.
    section = dataclasses.replace(section, param_dtype=saved["model"]["param_dtype"])
    lora = LoraSection(**saved["lora"] | {"targets": tuple(saved["lora"]["targets"])})
    policy = open_policy(run / POLICY, section, lora=lora)
    abstract, shardings = param_shapes(policy.model), param_shardings(policy.model, mesh)
    trainable = ADAPTER if lora.rank else saved["train"]["trainable_pattern"]
    folder = base_folder(run, base) if lora.rank else None
    frozen = dataclasses.replace(policy, path=folder).load_base(mesh) if folder else None
    checkpoints = Checkpoints(run / CHECKPOINTS, read_only=True, base=folder)

    def restore(step: int) -> Params:
        return checkpoints.restore_params(step, abstract, shardings, trainable, frozen)

    if step == "best":
        metric = saved["checkpoint"]["best"]
        step = best_step(held_out_values(run, metric), checkpoints.steps)
        if step is None:
            raise ConfigError(
                f"{run} has no checkpoint with a value of checkpoint.best={metric!r}; set the step of a checkpoint: "
                f"{', '.join(map(str, checkpoints.steps))}."
            )
    if step in checkpoints.steps:
        return policy, restore(step), step
    newest = checkpoints.restore_latest(restore) if step is None else None
    if newest is None:
        raise FileNotFoundError(f"{run} has no checkpoint of step {step}; available steps: {checkpoints.steps}.")
    return policy, newest[1], newest[0]


def run_digests(run: Path, step: int) -> dict[str, str]:
    """Returns digests that identify the policy of a run at a step, independently of the path of the run.

    Args:
      run: Run folder.
      step: Step of a checkpoint.

    Returns:
      "model_files", the digest of the model configuration and tokenizer in the run folder, and "weights", the digest of
      the checkpoint. "weights" is omitted if the checkpoint does not exist or was emptied.
    """
    weights = checkpoint_digest(run, step)
    return {"model_files": model_digest(run / POLICY)} | ({"weights": weights} if weights else {})


def base_folder(run: Path, moved: Path | None = None) -> Path:
    """Returns the folder of the base policy of a run that trained an adapter.

    Args:
      run: Run folder.
      moved: New folder of the base policy. If None, the path that the run recorded is used.

    Raises:
      FileNotFoundError: If the folder does not exist.
    """
    folder = moved or Path(read_about(run)["base"])
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{run} contains an adapter of the policy in {folder}, which does not exist; restore that folder, or "
            "export the run with --base=FOLDER."
        )
    return folder


def base_name(run: Path, moved: Path | None = None) -> str:
    """Returns the hub name of the base policy or, if the run read it from a folder, that folder.

    Args:
      run: Run folder.
      moved: New folder of the base policy, if it has moved since the run. Takes precedence.
    """
    named = str(read_config(run)["model"]["path"])
    return str(moved or (named if named and not Path(named).is_dir() else base_folder(run)))
