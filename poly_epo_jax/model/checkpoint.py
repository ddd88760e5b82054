"""Checkpoints of everything that a run needs to continue bit for bit: policy, optimizer, step, data position (Orbax).

Each records fingerprints of its content (fingerprint.py), so that a damaged checkpoint is never taken for intact.
"""

import contextlib
import dataclasses
import errno
import gc
import hashlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.model.fingerprint import array_names, fingerprints
from poly_epo_jax.model.partition import merge_params, split_params
from poly_epo_jax.parallel import hosts
from poly_epo_jax.parallel.sharding import platform
from poly_epo_jax.system.text import first_line
from poly_epo_jax.types import Params

T = TypeVar("T")
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.ESTALE)
"""Errors of reading that say nothing of what was saved."""


class CheckpointError(ValueError):
    """A checkpoint is damaged; the message says which, and what to do."""


class Checkpoints:
    """Saves, in the background unless the arrays are a CPU's, and keeps the newest few.

    Args:
      directory: created if it does not exist.
      keep: how many checkpoints to keep; None: all.
      read_only: whether the checkpoints belong to another process, which may be saving and deleting them meanwhile.
      with_frozen: whether checkpoints also hold the frozen weights. If not, the reader gets these from elsewhere.
    """

    def __init__(self, directory: Path, keep: int | None = None, read_only: bool = False, with_frozen: bool = True):
        # Orbax logs every file at INFO, and every error that it also raises.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            read_only=read_only,
            cleanup_tmp_directories=not read_only,  # left by saves that a crash cut short
            enable_async_checkpointing=True,
        )
        _drop_late_callbacks()
        self._directory, self._read_only, self._with_frozen = directory.absolute(), read_only, with_frozen
        self._damaged = self._directory.with_name(f"{directory.name}.damaged")
        with self._saving():
            self._manager = ocp.CheckpointManager(self._directory, options=options)

    @property
    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint; one that a crash cut short does not count."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return sorted(self._manager.all_steps())

    @property
    def num_damaged(self) -> int:
        """How many checkpoints of this run have been found damaged and set aside so far."""
        return sum(1 for _ in self._damaged.glob("[0-9]*"))

    def save(self, step: int, state: Any, data_state: dict[str, Any]) -> None:
        """Saves, or starts to; `state` may be donated as soon as this returns.

        Raises:
          OSError: this checkpoint cannot be written, or the previous one could not be.
        """
        content = {"data": data_state, "fingerprints": fingerprints(state)}
        state = state if self._with_frozen else dataclasses.replace(state, frozen={})
        data = ocp.args.JsonSave(content | {"digest": _digest(content)})
        with self._saving():
            self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), data=data))
            if platform() == "cpu":
                # Its arrays are written from where they are, not from a copy. An update that is donated them meanwhile
                # would copy them all, and the process would hold the whole state twice.
                self._manager.wait_until_finished()

    def restore(self, step: int, like: Any, shardings: Any, frozen: Params | None = None) -> tuple[Any, dict[str, Any]]:
        """The state and data position at `step`, laid out by `shardings`, whatever mesh they were saved from.

        Args:
          frozen: the frozen weights, if the checkpoint does not hold them.

        Raises:
          CheckpointError: the checkpoint is damaged.
          ConfigError: another version has saved other arrays, or `frozen` are not those of the state.
        """
        if frozen is not None:
            like, shardings = (dataclasses.replace(part, frozen={}) for part in (like, shardings))
        tree = _abstract(like, shardings)
        state, data = self._verified(step, tree, ocp.args.StandardRestore(tree), frozen)
        return state if frozen is None else dataclasses.replace(state, frozen=frozen), data

    def restore_params(
        self, step: int, like: Params, shardings: Params, trainable: str = "", frozen: Params | None = None
    ) -> Params:
        """The policy's weights alone; optimizer and data position stay on disk.

        Args:
          trainable: the pattern of the weights that were trained, see `split_params`.
          frozen: the other weights, if the checkpoint does not hold them.

        Raises:
          CheckpointError: the weights are damaged.
          ConfigError: another version has saved other arrays, or `frozen` are not those of the state.
        """
        parts = split_params(_abstract(like, shardings), trainable)
        weights = {name: part for name, part in zip(("trainable", "frozen"), parts, strict=True) if part}
        if frozen is not None:
            del weights["frozen"]
        args = ocp.args.PyTreeRestore(
            item=weights, restore_args=ocp.checkpoint_utils.construct_restore_args(weights), partial_restore=True
        )
        restored, _ = self._verified(step, weights, args, frozen)
        return merge_params(restored["trainable"], restored.get("frozen", {}) if frozen is None else frozen)

    def newest(self, restore: Callable[[int], T]) -> tuple[int, T] | None:
        """The newest intact checkpoint: its step and the result of `restore`; None if there is no checkpoint at all.

        Damaged newer checkpoints are named on stderr, and set aside if this process is the one that saves.

        Raises:
          CheckpointError: all checkpoints are damaged; they are left where they are.
        """
        damaged: dict[int, CheckpointError] = {}
        while left := [step for step in self.steps if step not in damaged]:
            step = left[-1]
            try:
                restored = hosts.on_all(partial(restore, step))
            except (CheckpointError, hosts.HostError) as error:
                damaged[step] = CheckpointError(error)
                self._manager.reload()  # the process that saves may have deleted it and saved another meanwhile
                continue
            hosts.on_first(partial(self._set_aside, damaged, step))
            self._manager.reload()
            return step, restored
        if damaged:
            raise CheckpointError(
                f"All checkpoints in {self._directory} are damaged. Restore one from a backup, or delete the run "
                f"folder to start over. {' '.join(map(str, damaged.values()))}"
            )
        return None

    def close(self) -> None:
        """Waits until every save that was started is on disk.

        Raises:
          OSError: one cannot be written.
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
        path = self._directory / str(step)
        content = self._read(step, data=ocp.args.JsonRestore()).data
        if not isinstance(content, dict) or content.pop("digest", None) != _digest(content):
            raise CheckpointError(f"The checkpoint {path} is damaged (its digest does not match its record).")
        if others := _other_arrays(tree, content["fingerprints"]):
            raise ConfigError(
                f"The checkpoint {path} is of another version of poly_epo_jax: it differs in {', '.join(others[:3])}. "
                "Resume with that version, or set --config.workdir to a new folder."
            )
        state = self._read(step, state=args).state
        if not _same_content(state, content["fingerprints"]):
            raise CheckpointError(f"The checkpoint {path} is damaged (it holds other numbers than were saved).")
        if frozen is not None and not _same_content({"frozen": frozen}, content["fingerprints"]):
            raise ConfigError(
                f"The checkpoint {path} was trained beside the weights of another base policy; set model.path to the "
                "folder that the run started with."
            )
        return state, content["data"]

    def _read(self, step: int, **items: Any) -> Any:
        """Reads items of a checkpoint by their Orbax arguments. Raises CheckpointError or OSError, whatever fails."""
        with _quiet():
            try:
                return self._manager.restore(step, args=ocp.args.Composite(**items))
            except Exception as error:  # Orbax and TensorStore raise many types
                reason = _reason(error)
                if _os_error_code(error) in _PASSING:
                    raise OSError(
                        f"Failed to read checkpoint {self._directory / str(step)}: {reason}. Fix the problem and rerun "
                        "the command to resume."
                    ) from error
        # The original error is not chained, because its traceback would keep Orbax's coroutines alive.
        raise CheckpointError(f"The checkpoint {self._directory / str(step)} is damaged ({reason}).")

    def _set_aside(self, damaged: dict[int, CheckpointError], step: int) -> None:
        """Moves damaged checkpoints away, to make room for those that will be saved at the same steps again."""
        for number, error in damaged.items():
            print(f"Warning: {error} Going on from that of step {step}.", file=sys.stderr)
            if (self._directory / str(number)).exists() and not self._read_only:
                self._damaged.mkdir(exist_ok=True)
                shutil.rmtree(self._damaged / str(number), ignore_errors=True)
                (self._directory / str(number)).rename(self._damaged / str(number))

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # on a full disk TensorStore, the thread or the file may raise
            raise OSError(
                f"The checkpoint cannot be written to {self._directory} ({_reason(error)}); make room or choose a "
                "writable folder. What was saved before is whole, and the same command goes on from there."
            ) from error


def _abstract(like: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like, shardings)


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
    """Silences the coroutines that Orbax leaves behind when reading fails: each would complain once it is collected."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        gc.collect()
        sys.unraisablehook = hook


def _drop_late_callbacks() -> None:
    """Silences TensorStore's threads: when writing fails, Orbax closes its loop, and each prints that it is closed."""
    before = sys.unraisablehook

    def hook(raised: Any) -> None:
        if str(raised.exc_value) != "Event loop is closed":
            before(raised)

    sys.unraisablehook = hook


def _reason(error: Exception) -> str:
    """What the operating system says, or else the first line: TensorStore goes on with all that it knows."""
    code = _os_error_code(error)
    return first_line(error)[:200] if code is None else os.strerror(code)


def _os_error_code(error: Exception) -> int | None:
    """The operating system's number of the error, if it is one of its."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return int(found[1]) if found else error.errno if isinstance(error, OSError) else None


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
