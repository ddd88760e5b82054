"""Checkpoints of everything a run needs to go on bit for bit: policy, optimizer, step and data position (Orbax)."""

import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from poly_epo_jax.model.partition import merge_params, split_params
from poly_epo_jax.types import Params


class Checkpoints:
    """Saves in the background, keeps the newest few.

    Args:
      directory: made if it does not exist.
      keep: how many checkpoints stay; None: all.
    """

    def __init__(self, directory: Path, keep: int | None = None):
        logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of every file at INFO
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    @property
    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step; one that a crash cut short does not count."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, data_state: dict[str, Any]) -> None:
        """Starts saving; `state` may be donated as soon as this returns."""
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data_state))
        )

    def restore(self, step: int, like: Any, shardings: Any) -> tuple[Any, dict[str, Any]]:
        """The state and data position at `step`, laid out by `shardings`, whatever mesh they were saved from."""
        args = ocp.args.StandardRestore(_abstract(like, shardings))
        restored = self._manager.restore(step, args=ocp.args.Composite(state=args, data=ocp.args.JsonRestore()))
        return restored.state, restored.data

    def restore_params(self, step: int, like: Params, shardings: Params, trainable: str = "") -> Params:
        """The policy's weights alone; optimizer and data position stay on disk.

        Args:
          trainable: the pattern of the weights that were trained, see `split_params`.
        """
        parts = split_params(_abstract(like, shardings), trainable)
        weights = {name: part for name, part in zip(("trainable", "frozen"), parts, strict=True) if part}
        restore_args = ocp.checkpoint_utils.construct_restore_args(weights)
        args = ocp.args.PyTreeRestore(item=weights, restore_args=restore_args, partial_restore=True)
        restored = self._manager.restore(step, args=ocp.args.Composite(state=args)).state
        return merge_params(restored["trainable"], restored.get("frozen", {}))

    def close(self) -> None:
        """Waits until what was begun is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def _abstract(like: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like, shardings)
