"""Writes a checkpoint to the run's own disk, and checks that it is read back bit for bit."""

import contextlib
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from poly_epo_jax.doctor.examine import Failed, Seen, Subject
from poly_epo_jax.doctor.small_model import random_params, small_shape
from poly_epo_jax.model.checkpoint import Checkpoints
from poly_epo_jax.model.fingerprint import fingerprints
from poly_epo_jax.model.qwen3 import abstract_model
from poly_epo_jax.parallel import hosts
from poly_epo_jax.step.update import PolicyUpdate, TrainState, make_update


def check_checkpoint(subject: Subject) -> Seen:
    """Saves the state of a small model in a temporary folder on the run's disk. All hosts take part."""
    mesh, config = subject.mesh, subject.config
    shape = small_shape(subject.shape, mesh)
    update = make_update(config, abstract_model(shape), mesh)
    state = update.init(random_params(shape, mesh))
    workdir = Path(config.workdir).absolute()
    disk = next(path for path in (workdir, *workdir.parents) if path.is_dir())
    with contextlib.ExitStack() as held:
        # Removed even if this process is told to end.
        folder = Path(hosts.on_first(lambda: held.enter_context(TemporaryDirectory(prefix=".doctor-", dir=disk))))
        started = time.monotonic()
        restored, data = _round_trip(folder, update, state)
        seconds = time.monotonic() - started
    if data != {"step": 1} or fingerprints(restored) != fingerprints(state):
        raise Failed(
            f"a checkpoint in {disk} came back with other bits; do not train onto that disk before it is tested"
        )
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    figures = {"bytes": num_bytes, "seconds": seconds}
    return f"{num_bytes / 1e6:.2g} MB written to {disk} and read back bit for bit in {seconds:.1f} s", figures


def _round_trip(folder: Path, update: PolicyUpdate, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(1, state, {"step": 1})
    checkpoints.close()
    return Checkpoints(folder / "checkpoints", read_only=True).restore(1, update.abstract_state, update.shardings)
