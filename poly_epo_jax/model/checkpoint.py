"""Saves and restores checkpoints with Orbax: policy, optimizer state, step and data position.

A run that is resumed from a checkpoint continues bit for bit. Each checkpoint contains a record with fingerprints of
its arrays (fingerprint.py) and the data position, and a digest of this record. The digest and the fingerprints of the
restored arrays are verified when the checkpoint is read.
`Checkpoints.restore_latest` skips corrupted checkpoints and falls back to the newest valid one.
"""

import contextlib
import dataclasses
import errno
import gc
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN, PreservationPolicy

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.model.fingerprint import array_names, fingerprints
from poly_epo_jax.model.partition import merge_params, split_params
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.sharding import abstract_arrays, platform
from poly_epo_jax.system.digests import json_digest
from poly_epo_jax.system.text import first_line
from poly_epo_jax.types import Params

T = TypeVar("T")
_TRANSIENT_ERRORS = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EIO),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),  # network file systems
)
"""Error codes of the operating system that do not indicate a corrupted checkpoint."""


class CheckpointError(ValueError):
    """Raised when a checkpoint is corrupted. The message contains its path."""


class Checkpoints:
    """The checkpoints of a run. Arrays on accelerators are written in the background.

    Args:
      directory: Directory of the checkpoints. Unless `read_only`, it is created if it does not exist.
      keep: Number of the newest checkpoints to keep. If None, all checkpoints are kept.
      read_only: Whether the checkpoints belong to another process, which may save and delete checkpoints concurrently.
      base: Folder of the frozen weights. Checkpoints omit these weights, and the caller passes them to `restore`. If
        None, checkpoints contain all weights.

    Attributes:
      values: Values of `checkpoint.best` by step. The best checkpoint is kept in addition to the newest ones. It is
        determined when a checkpoint is saved, so evaluate a step before saving it.
    """

    def __init__(self, directory: Path, keep: int | None = None, read_only: bool = False, base: Path | None = None):
        # Orbax logs each file at level INFO, and logs errors that it also raises.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.values: dict[int, float] = {}
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(keep), _Best(self.values)]),
            read_only=read_only,
            cleanup_tmp_directories=not read_only,  # left behind by interrupted saves
            enable_async_checkpointing=True,
        )
        _drop_late_callbacks()
        self._directory, self._read_only, self._base = directory.absolute(), read_only, base
        self._corrupted = self._directory.with_name(f"{directory.name}.corrupted")
        with self._saving():
            self._manager = ocp.CheckpointManager(self._directory, options=options)

    @property
    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, in ascending order. Interrupted saves do not count."""
        return sorted(self._manager.all_steps())

    def is_best(self, step: int) -> bool:
        """Returns True if a step has a higher value than all steps with a checkpoint."""
        return best_step(self.values, {*self.steps, step}) == step

    @property
    def num_corrupted(self) -> int:
        """Number of corrupted checkpoints of this run that were moved to the folder of corrupted checkpoints."""
        return sum(1 for _ in self._corrupted.glob("[0-9]*"))

    def save(self, step: int, state: Any, data_state: dict[str, Any]) -> None:
        """Saves a checkpoint, in the background unless the arrays are on CPUs.

        Args:
          step: Training step.
          state: Training state. Its arrays may be donated after this method has returned.
          data_state: Position in the data and counters after this step, serializable as JSON.

        Raises:
          OSError: If this checkpoint cannot be written, or if writing the previous one failed.
        """
        content = {"data": data_state, "fingerprints": fingerprints(state)}
        state = state if self._base is None else dataclasses.replace(state, frozen={})
        data = ocp.args.JsonSave(content | {"digest": json_digest(content)})
        with self._saving():
            self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), data=data))
            if platform() == "cpu":
                # On CPU, arrays are written without an intermediate copy. If they were donated to an update during the
                # write, JAX would copy them and the process would hold two copies of the state.
                self._manager.wait_until_finished()

    def restore(self, step: int, like: Any, shardings: Any, frozen: Params | None = None) -> tuple[Any, dict[str, Any]]:
        """Restores a training state onto any mesh.

        Args:
          step: Step of the checkpoint.
          like: State with the shapes and types of the saved arrays.
          shardings: Sharding of each array. It may differ from the sharding at the time of saving.
          frozen: Frozen weights. Required if the checkpoint does not contain them, otherwise None.

        Returns:
          A tuple of the state and the state of the data iterator.

        Raises:
          CheckpointError: If the checkpoint is corrupted.
          ConfigError: If the checkpoint contains other arrays, as from another version of this package, or was trained
            with other frozen weights.
          OSError: If reading fails for a reason that does not indicate corruption, such as missing permissions.
        """
        if frozen is not None:
            like, shardings = (dataclasses.replace(part, frozen={}) for part in (like, shardings))
        tree = abstract_arrays(like, shardings)
        state, data = self._verified(step, tree, ocp.args.StandardRestore(tree), frozen)
        return state if frozen is None else dataclasses.replace(state, frozen=frozen), data

    def restore_params(
        self, step: int, like: Params, shardings: Params, trainable: str = "", frozen: Params | None = None
    ) -> Params:
        """Restores the weights of the policy without reading the optimizer state.

        Args:
          step: Step of the checkpoint.
          like: Parameter tree with the shapes and types of all weights.
          shardings: Sharding of each weight.
          trainable: Regular expression of the trained weights, see `split_params`.
          frozen: Frozen weights. Required if the checkpoint does not contain them, otherwise None.

        Returns:
          All weights of the policy.

        Raises:
          CheckpointError: If the weights are corrupted.
          ConfigError: If the checkpoint contains other arrays, as from another version of this package, or was trained
            with other frozen weights.
          OSError: If reading fails for a reason that does not indicate corruption, such as missing permissions.
        """
        parts = split_params(abstract_arrays(like, shardings), trainable)
        weights = {name: part for name, part in zip(("trainable", "frozen"), parts, strict=True) if part}
        if frozen is not None:
            del weights["frozen"]
        args = ocp.args.PyTreeRestore(
            item=weights, restore_args=ocp.checkpoint_utils.construct_restore_args(weights), partial_restore=True
        )
        restored, _ = self._verified(step, weights, args, frozen)
        return merge_params(restored["trainable"], restored.get("frozen", {}) if frozen is None else frozen)

    def restore_latest(self, restore: Callable[[int], T]) -> tuple[int, T] | None:
        """Restores the newest valid checkpoint.

        Corrupted newer checkpoints are reported on stderr. Unless `read_only`, they are also moved to the folder of
        corrupted checkpoints, because training will save these steps again.

        Args:
          restore: Function that restores the checkpoint of a step. It runs on all processes.

        Returns:
          The step and the result of `restore`, or None if there are no checkpoints.

        Raises:
          CheckpointError: If all checkpoints are corrupted. They are not moved.
        """
        corrupted: dict[int, CheckpointError] = {}
        while left := [step for step in self.steps if step not in corrupted]:
            step = left[-1]
            try:
                restored = hosts.run_on_all(partial(restore, step))
            except (CheckpointError, hosts.HostError) as error:
                if isinstance(error, hosts.HostError) and "is corrupted" not in str(error):
                    raise  # another process could not read the checkpoint
                corrupted[step] = CheckpointError(error)
                self._manager.reload()  # The saving process may have deleted this checkpoint and saved another one.
                continue
            hosts.run_on_first(partial(self._quarantine, corrupted, step))
            self._manager.reload()
            return step, restored
        if corrupted:
            raise CheckpointError(
                f"All checkpoints in {self._directory} are corrupted. Restore one from a backup, or delete the run "
                f"folder to start over. {' '.join(map(str, corrupted.values()))}"
            )
        return None

    def close(self) -> None:
        """Waits until all saves are complete, and releases the resources of Orbax.

        Raises:
          OSError: If a checkpoint cannot be written.
        """
        with self._saving():
            self._manager.wait_until_finished()
            self._manager.close()

    def _verified(self, step: int, tree: Any, args: Any, frozen: Params | None) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint and compares it with its own fingerprints.

        Args:
          tree: Abstract arrays that the checkpoint must hold.
          args: Orbax arguments that restore these arrays.
          frozen: Frozen weights with which the checkpoint must have been saved. If None, they are not compared.

        Returns:
          The state and the data position.
        """
        path, content = self._directory / str(step), self._read(step, data=ocp.args.JsonRestore()).data
        if not isinstance(content, dict) or content.pop("digest", None) != json_digest(content):
            raise CheckpointError(f"Checkpoint {path} is corrupted: its digest does not match its record.")
        if others := _other_arrays(tree, content["fingerprints"]):
            raise ConfigError(
                f"Checkpoint {path} was saved by another version of poly_epo_jax: {', '.join(others[:3])} differ. "
                "Resume with that version, or set --config.workdir to a new folder."
            )
        state = self._read(step, state=args).state
        if not _same_content(state, content["fingerprints"]):
            raise CheckpointError(f"Checkpoint {path} is corrupted: its arrays do not match their fingerprints.")
        if frozen is not None and not _same_content({"frozen": frozen}, content["fingerprints"]):
            raise ConfigError(
                f"Checkpoint {path} was trained with other frozen weights than those in {self._base}; restore this "
                "folder, or set model.path (for an export: --base) to the base policy that the run was started with."
            )
        return state, content["data"]

    def _read(self, step: int, **items: Any) -> Any:
        """Reads items of a checkpoint with their Orbax arguments. Raises CheckpointError or OSError on any failure."""
        with _quiet():
            try:
                return self._manager.restore(step, args=ocp.args.Composite(**items))
            except Exception as error:  # Orbax and TensorStore raise many types
                reason = _reason(error)
                if (cause := _transient_cause(error)) is not None:
                    raise OSError(
                        f"Failed to read checkpoint {self._directory / str(step)}: {_reason(cause)}. Fix the problem "
                        "and rerun the command to resume."
                    ) from error
        # The original error is not chained, because its traceback would keep Orbax's coroutines alive.
        raise CheckpointError(f"Checkpoint {self._directory / str(step)} is corrupted: {reason}.")

    def _quarantine(self, corrupted: dict[int, CheckpointError], step: int) -> None:
        """Reports corrupted checkpoints. Unless `read_only`, moves them, because their steps will be saved again."""
        for number, error in corrupted.items():
            print(f"Warning: {error} Resuming from step {step}.", file=sys.stderr)
            if (self._directory / str(number)).exists() and not self._read_only:
                self._corrupted.mkdir(exist_ok=True)
                shutil.rmtree(self._corrupted / str(number), ignore_errors=True)
                (self._directory / str(number)).rename(self._corrupted / str(number))

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # On a full disk, TensorStore, its threads or the file system may raise.
            raise OSError(
                f"Failed to write a checkpoint to {self._directory}: {_reason(error)}. Free disk space or choose a "
                "writable folder. Earlier checkpoints are intact. Rerun the command to resume."
            ) from error


@dataclasses.dataclass
class _Best(PreservationPolicy):
    """Preserves the checkpoint with the highest value."""

    values: Mapping[int, float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = best_step(self.values, steps)
        return [step == best for step in steps]


def best_step(values: Mapping[int, float], steps: Collection[int]) -> int | None:
    """Returns the first of the steps with the highest value. Returns None if none of them has a value.

    Args:
      values: Finite values by step.
      steps: Steps to choose from.
    """
    return max(values.keys() & steps, key=lambda step: (values[step], -step), default=None)


def _other_arrays(tree: Any, saved: Collection[str]) -> list[str]:
    """Returns the names of arrays that only one of `tree` and `saved` has.

    Args:
      tree: Arrays, in a tree with some of the top-level names of the saved tree.
      saved: Names of the saved arrays. Names outside these top-level names are ignored.
    """
    names = set(array_names(tree))
    parts = {name.partition(".")[0] for name in names}
    return sorted(names ^ {name for name in saved if name.partition(".")[0] in parts})


def _same_content(tree: Any, saved: Mapping[str, int]) -> bool:
    """Returns True if all arrays of `tree` have the saved fingerprints. Every process of a mesh must call this."""
    return fingerprints(tree).items() <= saved.items()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the warnings about coroutines that Orbax leaves behind when reading fails."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        gc.collect()
        sys.unraisablehook = hook


def _drop_late_callbacks() -> None:
    """Suppresses the errors that TensorStore threads print after Orbax has closed its event loop on a failed write."""
    before = sys.unraisablehook

    def hook(raised: Any) -> None:
        if str(raised.exc_value) != "Event loop is closed":
            before(raised)

    sys.unraisablehook = hook


def _reason(error: BaseException) -> str:
    """Returns the error message of the operating system, or the first line of other errors, which may be long."""
    code = _os_error_code(error)
    return first_line(error)[:200] if code is None else os.strerror(code)


def _os_error_code(error: BaseException) -> int | None:
    """Returns the error code of the operating system, or None for other errors."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return int(found[1]) if found else error.errno if isinstance(error, OSError) else None


def _transient_cause(error: BaseException | None) -> BaseException | None:
    """Returns the cause of an error, such as a lack of host or device memory, that does not indicate corruption.

    Orbax raises errors with other types and messages than their causes. Returns None if there is no such cause.
    """
    while error and _os_error_code(error) not in _TRANSIENT_ERRORS and "RESOURCE_EXHAUSTED" not in str(error):
        error = error.__cause__ or error.__context__
    return error
